"""The rules of the public table (docs/table.md): what all entries have in common."""

from dataclasses import dataclass

from lm.data.documentation.packages import TEXT_DIGEST


@dataclass(frozen=True)
class Rules:
    """Holds what all entries have in common; an archive has those that it was made by."""

    scale: str = "mini"  # of the study: sizes and steps that an entry starts from
    text: str = TEXT_DIGEST  # SHA-256 of the text that is learnt and held out
    seeds: int = 5  # runs, with seeds 0, 1, ...
    flops: float = 2.1e13  # of all pre-training of a run, by formula [FLOP]
    parameters: int = 2_000_000  # of a network
    counts: int = 30_000_000  # numbers that a counted model stores
    held_out_documents: int = 64  # whose bits per byte are measured, drawn from the validation split
    level: float = 0.05  # probability of a false record in the whole table, if no entry beats the first


RULES = Rules()
