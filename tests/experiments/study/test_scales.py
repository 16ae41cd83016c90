"""What the larger scales read and what they cost, as docs/study.md promises."""

import re

import pytest
from paths import ROOT

from experiments.runs.kinds.network import NetworkStage, model_parameters
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.data.packing import row_length
from lm.train.flops import step_flops

BASELINE = "t5/1-baseline/baseline"


def tokens_of_text(scale):
    """The tokens of text that the baseline reads in pre-training, without its start."""
    experiment = build(BASELINE, scale)
    (stage,) = [
        stage for stage in stages(experiment) if stage.is_pretraining and not stage.is_start_pretraining
    ]
    return stage.training.steps * stage.training.batch_size * stage.lengths.raw


def flops(scale):
    """Return the FLOPs of pre-training, its start included, and of a row as a whole."""
    experiment = build(BASELINE, scale)
    counted = []
    for stage in stages(experiment):
        assert isinstance(stage, NetworkStage)
        targets = row_length(experiment.model.architecture, stage.lengths)
        step = step_flops(experiment.model, stage.training.batch_size, stage.lengths.inputs, targets)
        counted.append((stage.is_pretraining, stage.training.steps * step))
    return sum(cost for is_pretraining, cost in counted if is_pretraining), sum(cost for _, cost in counted)


def test_small_reads_a_hundred_million_tokens_of_a_text_that_it_does_not_repeat():
    assert tokens_of_text("small") >= 100e6
    assert build(BASELINE, "small").data.corpus == build(BASELINE, "medium").data.corpus


def test_medium_has_the_recipe_of_nanot5():
    experiment = build(BASELINE, "medium")
    optimizer = pretraining_spec(experiment).optimizer
    assert 16.5 <= tokens_of_text("medium") / model_parameters(experiment.model) <= 17.5
    assert experiment.model.dropout == 0 and experiment.data.corpus.startswith("tfds:wikipedia")
    assert (optimizer.name, optimizer.schedule) == ("adamw-relative", "cosine")
    assert optimizer.decay_end == experiment.pretraining.steps
    assert optimizer.warmup_steps / optimizer.decay_end == pytest.approx(10_000 / 65_536, rel=0.01)


def test_a_row_with_more_steps_at_medium_decays_to_the_end_of_them():
    longer = build("t5/13-scaling/steps", "medium")
    assert pretraining_spec(longer).optimizer.decay_end == longer.pretraining.steps == 4 * 29_000


@pytest.mark.parametrize("scale", ["nano", "mini", "small", "medium"])
def test_the_table_of_scales_in_the_docs_has_the_parameters_tokens_and_flop_of_the_code(scale):
    page = (ROOT / "docs" / "study.md").read_text("utf-8")
    (line,) = re.findall(rf"(?m)^\| `{scale}` \|(.*)\|$", page)
    parameters, tokens, passes, pretraining, whole, *_ = (cell.strip() for cell in line.split("|"))
    del passes
    of_pretraining, of_row = flops(scale)
    million = model_parameters(build(BASELINE, scale).model) / 1e6
    assert parameters == f"{million:.2g} M" if million < 100 else f"{million:.3g} M"
    assert (
        tokens == f"{tokens_of_text(scale) / 1e6:,.3g} M" or tokens == f"{tokens_of_text(scale) / 1e6:,.0f} M"
    )
    assert pretraining == f"{of_pretraining:.2g}" and whole == f"{of_row:.2g}"
