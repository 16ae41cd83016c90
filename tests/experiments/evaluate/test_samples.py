"""What a model writes of held-out text, before its pre-training and after."""

from types import SimpleNamespace

import pytest
from tiny import TINY

from experiments.evaluate.samples import DECODING, PROMPT_LENGTH, Sample, first_example, held_out_sample
from experiments.runs.kinds.pretraining import pretraining_batches
from experiments.runs.prepare import prepare
from experiments.runs.run import Run
from experiments.study.registry import build
from experiments.study.scales import SCALES

STEPS = ("pretraining.steps", "pretraining.save_every", "pretraining.log_every")
VERSE = "the cat sat on the mat and the dog lay on the rug. "
QUIET = SimpleNamespace(
    **dict.fromkeys(("say", "complain", "start", "resumed", "advance", "first_step_done"), lambda *_: None)
)


@pytest.fixture
def own(tmp_path):
    """(row, settings given by hand) -> its experiment on a text of one's own."""
    (tmp_path / "verse.txt").write_text("\n\n".join(VERSE * 12 for _ in range(40)))
    SCALES["tiny"] = SCALES["nano"] | TINY
    given = {
        "data.corpus": f"text:{tmp_path / 'verse.txt'}",
        "data.vocabulary": "bytes",
        "data.inputs_length": 64,
        "tuning.mixtures": (),
        "tuning.heads": (),
    }
    yield lambda row, changes=None: build(row, "tiny", given | {"pretraining.steps": 1} | (changes or {}))
    del SCALES["tiny"]


def test_a_model_writes_before_and_after_it_has_learnt_a_text(own, tmp_path):
    fast = {"pretraining.optimizer.name": "adamw", "pretraining.optimizer.schedule": "constant"}
    fast |= {"pretraining.optimizer.learning_rate": 0.01} | dict.fromkeys(STEPS, 100)
    experiment, folder = own("gpt/base", fast), tmp_path / "tiny" / "gpt" / "base" / "seed-0"
    Run(experiment, folder, tmp_path / "cache").train(QUIET)
    sample = held_out_sample(experiment, folder)
    known = set(VERSE.split())
    assert sample.prompt in VERSE * 3 and sample.continuation in VERSE * 3
    words = [sample.before.split(), sample.after.split()]
    shares = [sum(word in known for word in some) / max(len(some), 1) for some in words]
    assert shares[0] < 0.2 < 0.4 < shares[1]


@pytest.mark.parametrize("row", ["gpt/base", "t5/2-architecture/prefix-lm", "t5/1-baseline/baseline"])
def test_what_is_read_and_what_should_be_written_are_an_example_of_the_objective(own, row, tmp_path):
    experiment = own(row)
    data = prepare(experiment, tmp_path / "cache", lambda line: None)
    batch = pretraining_batches(experiment, data, "validation")(0, slice(0, 1))
    read, true = first_example(batch, experiment.objective.has_inputs)
    assert read and true
    if batch.encoder is not None:
        assert read == batch.encoder.tokens[0][batch.encoder.segment_ids[0] == 1].tolist()
        return
    ids = [*batch.decoder.tokens[0][:1], *batch.decoder.targets[0]]
    assert read + true == ids[: len(read + true)] and len(true) <= DECODING.max_length
    prefix = batch.decoder.causal_attention[0].sum()
    assert len(read) == (prefix if experiment.objective.has_inputs else PROMPT_LENGTH)


def test_encoders_and_counts_write_nothing(own, tmp_path):
    for row in ("bert/base", "history/bigram"):
        assert held_out_sample(own(row), tmp_path) is None


def test_a_sample_is_shown_in_80_columns_with_every_word():
    texts = ("as it was", "no sense " * 30, "some sense " * 30, "as it is " * 9)
    lines = [*Sample(*texts).lines()]
    assert max(map(len, lines)) <= 80 and len(lines) > 8
    assert " ".join(" ".join(lines).split()) == " ".join(
        f"{label}: {text.strip()}"
        for label, text in zip(
            ("held-out text", "before training", "after training", "in the text"), texts, strict=True
        )
    )
