"""``lm COMMAND --help``: what it does, two examples, its arguments; the settings that people change first."""

import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import Any

from experiments.cli.usage.options import NO_DEFAULT, Taken, meanings_of, options_of
from experiments.study.scales import SCALES

HELP_WORDS = ("-h", "--help", "--help-all")
CHANGED_OFTEN = (  # the settings that people change, in the order of the help
    "data.corpus",
    "data.vocabulary",
    "data.vocabulary_size",
    "data.inputs_length",
    "objective.noise",
    "objective.rate",
    "objective.mean_span_length",
    "model.architecture",
    "model.num_encoder_layers",
    "model.num_decoder_layers",
    "model.d_model",
    "model.mlp.d_ff",
    "model.attention.num_heads",
    "model.positions.kind",
    "model.dropout",
    "pretraining.steps",
    "pretraining.batch_size",
    "pretraining.optimizer.name",
    "pretraining.optimizer.learning_rate",
    "finetuning.steps",
    "finetuning.batch_size",
    "finetuning.optimizer.learning_rate",
    "tuning.mixtures",
    "seed",
)
NARROWEST, WIDEST_PAGE = 60, 100  # [characters]
COLUMN = 30  # where meanings begin [characters]


def help_page(
    program: str, function: Callable, examples: Sequence[str], defaults_of: str, whole: bool
) -> str:
    """The help of the command ``program``; ``whole``: with all settings.

    ``defaults_of`` says whose values the defaults of settings are.
    """
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST_PAGE)
    taken, meanings = options_of(function), meanings_of(function)
    places = [each for each in taken if each.in_place]
    own = [each for each in taken if not each.in_place and not is_setting(each, taken)]
    settings = [each for each in taken if is_setting(each, taken)]
    usual = sorted(
        (x for x in settings if x.name in CHANGED_OFTEN), key=lambda x: CHANGED_OFTEN.index(x.name)
    )
    rest = [each for each in settings if each not in usual]
    lines = [*about(function, width), ""]
    lines += [*(f"  {example}" for example in examples), *[""] * bool(examples)]
    lines += [f"usage: {usage(program, places)}", ""]
    for heading, group in (("", places), ("Options:", own)):
        if group:
            lines += [*([heading] if heading else []), *rows(group, meanings, width), ""]
    if settings:
        lines += [f"Settings that people change, with the values of {defaults_of}:"]
        lines += [*rows(usual, meanings, width), ""]
        lines += [*_groups(rest, meanings, width)] if whole else [f"{len(rest)} more: {program} --help-all"]
    return "\n".join(lines).rstrip()


def is_setting(each: Taken, taken: Sequence[Taken]) -> bool:
    """Whether it is a setting of a row rather than an option of the command."""
    experiment = any(other.name == "pretraining.steps" for other in taken)
    return experiment and not each.in_place and ("." in each.name or each.name in ("seed", "generator_share"))


def usage(program: str, places: Sequence[Taken]) -> str:
    """``"lm run ROW [OPTIONS]"``."""
    words = [each.value if each.default is NO_DEFAULT else f"[{each.value}]" for each in places]
    return " ".join([program, *words, "[OPTIONS]"])


def about(function: Callable, width: int) -> Iterator[str]:
    """The docstring without its arguments, wrapped."""
    text = (inspect.getdoc(function) or "").partition("\nArgs:\n")[0]
    for number, part in enumerate(text.strip().split("\n\n")):
        if number:
            yield ""
        yield from wrap(part, width)


def rows(group: Sequence[Taken], meanings: dict[str, str], width: int) -> Iterator[str]:
    """A line or more for each argument: what it is called, what it means, its default."""
    for each in group:
        head = f"  {called(each)}"
        choices = SCALES if each.name == "scale" else each.choices if each.value.startswith("CHOICE") else ()
        chosen = f": {', '.join(choices)}" if choices else ""
        meaning = (
            re.sub(r"(?<!\.)\.$", "", meanings.get(each.name, "")) + chosen + shown_default(each)
        ).strip()
        lines = wrap(meaning, width - COLUMN) or [""]
        if len(head) < COLUMN - 1:
            yield f"{head:{COLUMN}}{lines.pop(0)}".rstrip()
        else:
            yield head
        yield from (f"{'':{COLUMN}}{line}" for line in lines)


def called(each: Taken) -> str:
    """``"ROW"``, ``"--seed N"`` or ``"--check, --no-check"``."""
    if each.in_place:
        return each.value
    if each.kind is bool:
        return f"{each.flag}, {opposite(each)}"
    return f"{each.flag} {each.value}"


def opposite(each: Taken) -> str:
    """The flag that switches it off: ``--model.no-bias`` for ``--model.bias``."""
    group, dot, last = each.flag[2:].rpartition(".")
    return f"--{group}{dot}no-{last}"


def shown_default(each: Taken) -> str:
    """``" (default: 300)"``, or nothing where that says nothing."""
    value: Any = each.default
    if value is NO_DEFAULT or value is False or value == "" or (value is None and "." not in each.name):
        return " (required)" if value is NO_DEFAULT and not each.in_place else ""
    if isinstance(value, tuple):
        value = " ".join(map(str, value)) or "none"
    elif isinstance(value, float):
        value = f"{value:.6g}"
    return f" (default: {'none' if value is None else 'on' if value is True else value})"


def _groups(rest: Sequence[Taken], meanings: dict[str, str], width: int) -> Iterator[str]:
    """All other settings, by the group that they are in."""
    for group in dict.fromkeys(each.name.rpartition(".")[0] for each in rest):
        yield f"{group or 'Others'}:"
        yield from rows([x for x in rest if x.name.rpartition(".")[0] == group], meanings, width)
        yield ""
