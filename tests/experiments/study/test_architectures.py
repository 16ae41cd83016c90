"""The table of architectures at equal FLOP: its rows spend what they say."""

import pytest

from experiments.study.now.architectures import step_flops
from experiments.study.registry import build, find
from lm.data.packing import row_length
from lm.data.pretraining import pretraining_lengths
from lm.train import flops

ROWS = [row.name for row in find("now/2-architectures")]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_spends_the_flop_of_the_first_as_its_layers_count_them(name):
    def counted(name):
        experiment = build(name, "mini")
        model, inputs_length = experiment.model, experiment.data.inputs_length
        lengths = pretraining_lengths(experiment.objective, model.architecture, inputs_length)
        targets = row_length(model.architecture, lengths)
        return flops.step_flops(model, 1, lengths.inputs, targets), experiment

    found, experiment = counted(name)
    assert step_flops(experiment) == found
    first, redllm = counted(ROWS[0])
    total, due = found * experiment.pretraining.steps, first * redllm.pretraining.steps
    assert abs(total - due) <= found / 2


def test_rows_differ_in_what_their_names_say():
    models = {name.rpartition("/")[2]: build(name, "mini").model for name in ROWS}
    assert {name: (model.num_encoder_layers, model.num_decoder_layers) for name, model in models.items()} == {
        "redllm": (2, 2),
        "decllm": (2, 2),
        "prefix-decoder": (2, 2),
        "deep-encoder": (3, 1),
        "deep-decoder": (1, 3),
        "merged": (2, 2),
    }
    for model in models.values():
        assert model.attention.value_norm and not model.attention.norm_scale
        assert (model.cross_attention.positions == "continued") == model.has_encoder
        assert model.attention.output_norm == model.has_encoder
