"""Training from a checkpoint: whose model, vocabulary and special ids a run has, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import published
import pytest
import small_corpus
from tiny import TINY
from tokenizers import Tokenizer

from experiments.runs.checks import check_answer_lengths, check_start_parameters
from experiments.runs.init_from import overrides_of_start
from experiments.runs.kinds.finetuning import TextFinetuning
from experiments.runs.kinds.pretraining import ExternalCheckpoint, Pretraining
from experiments.runs.paths import save_settings
from experiments.runs.run import Run
from experiments.runs.stages import external_checkpoint, stages, stages_of
from experiments.study.overrides import (
    check_agreement_with_checkpoint,
    command_line_overrides,
    explicit_overrides,
    overrides_of,
)
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.config.base import SettingError
from lm.config.training import CheckpointConfig
from lm.convert import load
from lm.data.classification import Reader
from lm.data.tasks.labelled import LABELLED
from lm.nn.finetune import BODY, source_parameter
from lm.sharding import make_mesh, named
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.train.runtime.checkpoints import Checkpoints

ROW = "t5/1-baseline/baseline"
TEXT = {"tuning.mixtures": ("documentation-reading",), "tuning.heads": ()}
WRITERS = ("t5", "bart", "gpt2", "llama")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs with a small documentation corpus."""
    folder = tmp_path_factory.mktemp("started")
    small_corpus.prepare(folder / "cache")
    SCALES["tiny"] = SCALES["nano"] | TINY | {"tuning.inputs_length": 60, "finetuning.steps": 2}
    yield folder
    del SCALES["tiny"]


def checkpoint(runs, family):
    return str(published.write(family, runs / family))


def started(runs, family, row=ROW, **settings):
    changes = overrides_of_start(checkpoint(runs, family), runs)
    return build(row, "tiny", changes | TEXT | settings)


def whole(tokens, segments):
    """The ids of the first segment of a row."""
    return tokens[0][segments[0] == 1].tolist()


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=[] if x == "bart" else pytest.mark.slow) for x in WRITERS]
)
def test_texts_are_framed_by_the_ids_of_the_checkpoint_and_no_others(runs, family):
    experiment = started(runs, family)
    prepared = Run(experiment, runs / "tiny" / family, runs / "cache").check(print)
    (stage,) = stages(experiment, runs / "tiny" / family, runs / "cache")
    batch = stage.batches(prepared)(0, slice(0, 1))
    tokenizer, (_, eos, start) = Tokenizer.from_file(str(runs / family / "tokenizer.json")), ids_of(family)
    targets = whole(batch.decoder.targets, batch.decoder.segment_ids)
    assert whole(batch.decoder.tokens, batch.decoder.segment_ids) == [start, *targets[:-1]]
    sides = [targets]
    if experiment.model.has_encoder:
        sides += [whole(batch.encoder.tokens, batch.encoder.segment_ids)]
        assert all(ids == tokenizer.encode(tokenizer.decode(ids)).ids for ids in sides)
    else:
        question, answer = targets[: targets.index(eos)], targets[targets.index(eos) + 1 : -1]
        assert targets == [*question, eos, *answer, eos]
        assert question == tokenizer.encode(tokenizer.decode(question), add_special_tokens=False).ids


def ids_of(family):
    """pad, end and start of a checkpoint, those that config.json does not name by its tokenizer."""
    pad, eos, start = published.FAMILIES[family][3]
    return pad, eos, {"gpt2": eos, "llama": 1}.get(family, start)


@pytest.mark.parametrize(
    ("family", "between", "second_type"), [("bert", 1, 1), ("roberta", 2, 0), ("bart", 2, 0)]
)
def test_pairs_for_a_head_are_framed_as_the_tokenizer_frames_them(runs, family, between, second_type):
    vocabulary = load_pretrained_tokenizer(Path(checkpoint(runs, family)), 400)
    architecture = "encoder-decoder" if family == "bart" else "encoder"
    reader = Reader(LABELLED["follows"], vocabulary, architecture, 60)
    row = {"sentence1": "the cat sat", "sentence2": "a dog ran", "label": 1}
    (example,) = reader.example(row).rows
    encoding = Tokenizer.from_file(str(runs / family / "tokenizer.json")).encode("the cat sat", "a dog ran")
    assert (example.tokens.tolist(), example.types.tolist()) == (encoding.ids, encoding.type_ids)
    assert max(encoding.type_ids) == second_type and len(vocabulary.template.separator) == between


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.slow), "gpt2"])
def test_training_starts_with_every_parameter_of_the_checkpoint(runs, family):
    experiment = started(runs, family, "bert/base", **{"tuning.mixtures": (), "tuning.heads": ("follows",)})
    given, (stage,) = (
        external_checkpoint(experiment, runs / "cache"),
        stages(experiment, runs / "tiny" / "x", runs / "cache"),
    )
    assert (stage.parent.folder, stage.parent_step) == (given.folder, 0)
    with Checkpoints(given.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        names = checkpoints.parameter_names(0)
    _, model = load(runs / family)
    assert {source_parameter(names, BODY + name) for name in named(model)} == set(named(model)) == set(names)


def test_a_start_is_made_once_and_named_by_its_files_wherever_they_lie(runs, tmp_path):
    changes = overrides_of_start(checkpoint(runs, "gpt2"), runs)
    shutil.copytree(runs / "gpt2", tmp_path / "other-name")
    assert overrides_of_start(str(tmp_path / "other-name"), runs) == changes
    made = sorted(path.name for path in (runs / "starts").glob("gpt2-*"))
    assert made == [changes["start.model"]]
    other = published.write("gpt2", tmp_path / "seed-1", seed=1)
    assert overrides_of_start(str(other), runs)["start.model"] != changes["start.model"]


def test_a_run_is_a_start_too_with_its_own_vocabulary(runs):
    first = overrides_of_start(checkpoint(runs, "llama"), runs)
    again = overrides_of_start(str(runs / "starts" / first["start.model"]), runs)
    model = {path: value for path, value in first.items() if path.startswith(("model.", "data."))}
    assert {path: again[path] for path in model} == model and again["start.model"] != first["start.model"]
    with pytest.raises(SettingError, match="'squad'"):
        overrides_of_start(f"{runs / 'starts' / first['start.model']}:squad", runs)


def test_what_is_no_start_is_said(runs, tmp_path):
    folder = checkpoint(runs, "gpt2")
    with pytest.raises(
        SettingError, match=f"--start {folder}:squad: {folder} is no run and has no stage 'squad'"
    ):
        overrides_of_start(f"{folder}:squad", runs)
    vectors = build("vectors/negative", "nano", {"vectors.epochs": 1})
    save_settings(tmp_path / "vectors", vectors, runs / "cache")
    with pytest.raises(SettingError, match="its settings ask for no training of a model of texts"):
        overrides_of_start(str(tmp_path / "vectors"), runs)


def test_pre_training_goes_on_from_the_checkpoint_where_its_steps_are_named(runs):
    tuned, continued = (
        stages(started(runs, "bart", **{"pretraining.steps": steps}), runs / "tiny" / "x", runs / "cache")
        for steps in (0, 3)
    )
    assert [type(stage) for stage in tuned] == [TextFinetuning] and type(
        tuned[0].parent
    ) is ExternalCheckpoint
    assert [(type(stage), type(stage.parent)) for stage in continued] == [
        (Pretraining, ExternalCheckpoint),
        (TextFinetuning, Pretraining),
    ]
    fresh = stages(build(ROW, "tiny", {"pretraining.steps": 3}), runs / "tiny" / "x", runs / "cache")
    assert continued[0].folder != next(s for s in fresh if s.is_pretraining).folder
    control = stages(
        started(runs, "bart", **{"start.weights": "random"}), runs / "tiny" / "x", runs / "cache"
    )
    assert [stage.parent for stage in control] == [None]


BOTH = {"model.architecture": "encoder-decoder"}


@pytest.mark.parametrize(
    ("family", "cross"),
    [("llama", "the checkpoint's self-attention"), pytest.param("bert", "random", marks=pytest.mark.slow)],
)
def test_one_stack_of_a_checkpoint_becomes_both_of_an_encoder_decoder(runs, capsys, family, cross):
    changes = overrides_of_start(checkpoint(runs, family), runs, BOTH)
    assert changes["start.model"].startswith(f"{family}-as-encoder-decoder-")
    said = capsys.readouterr().err
    assert f"cross-attention: {cross}" in said and f"--start {runs / family}: encoder: the" in said
    again = overrides_of_start(checkpoint(runs, family), runs, BOTH)
    assert again == changes and capsys.readouterr().err == said
    experiment = build(ROW, "tiny", changes | TEXT | BOTH)
    check_agreement_with_checkpoint(experiment, BOTH)
    prepared = Run(experiment, runs / "tiny" / f"both-{family}", runs / "cache").check(print)
    (stage,) = stages(experiment, runs / "tiny" / f"both-{family}", runs / "cache")
    batch = stage.batches(prepared)(0, slice(0, 1))
    special = experiment.model.special
    due = {"llama": (1, 2), "bert": (2, 3)}  # <s> and </s>, [CLS] and [SEP]
    assert (special.start, special.eos) == due[family]
    assert batch.encoder is not None and batch.decoder.tokens[0, 0] == special.start
    (own,) = stages_of(runs / "starts" / changes["start.model"])
    params = named(own.restore_transformer(make_mesh(experiment.mesh)))
    side = "encoder" if family == "bert" else "decoder"
    name = "blocks.attention.query.kernel"
    expected = named(load(runs / family)[1])[f"{side}.{name}"]
    assert all((params[f"{each}.{name}"] == expected).all() for each in ("encoder", "decoder"))


def test_a_checkpoint_of_two_stacks_is_not_taken_apart_and_layers_are_those_of_the_checkpoint(runs):
    message = "--start .*bart: .*'decoder' cannot start from .*'encoder-decoder'"
    with pytest.raises(SettingError, match=message):
        overrides_of_start(checkpoint(runs, "bart"), runs, {"model.architecture": "decoder"})
    changes = overrides_of_start(checkpoint(runs, "llama"), runs, BOTH)
    experiment = build(ROW, "tiny", changes)
    with pytest.raises(SettingError, match="num_decoder_layers 3 contradicts --start"):
        check_agreement_with_checkpoint(experiment, BOTH | {"model.num_decoder_layers": 3})


def test_fewer_layers_than_the_checkpoints_are_some_of_its_own_in_a_start_that_is_made_once(runs, capsys):
    """As DistilBERT starts from BERT (Sanh et al. 2019)."""
    folder = published.write("bert", runs / "three-layers", num_encoder_layers=3)
    whole, fewer = overrides_of_start(str(folder), runs), {"model.num_encoder_layers": 2}
    changes = overrides_of_start(str(folder), runs, fewer)
    assert changes["start.model"] == f"{whole['start.model']}-2-encoder-layers"
    assert "model.num_encoder_layers=2: layers 0, 2 of the checkpoint" in capsys.readouterr().err
    assert overrides_of_start(str(folder), runs, fewer) == changes
    assert overrides_of_start(str(folder), runs, {"model.num_encoder_layers": 3}) == whole
    check_agreement_with_checkpoint(build("bert/base", "tiny", changes), fewer)
    three, two = (
        named(stage.restore_transformer(make_mesh(stage.settings.mesh)))
        for each in (whole, changes)
        for stage in stages_of(runs / "starts" / each["start.model"])
    )
    name = "encoder.blocks.mlp.out.kernel"
    assert (two[name] == three[name][np.array([0, 2])]).all()
    assert (two["embed.table"] == three["embed.table"]).all()


def test_a_start_with_fewer_layers_and_another_architecture_is_named_by_both_and_made_once(runs):
    folder = published.write("bert", runs / "three-layers", num_encoder_layers=3)
    both = BOTH | {"model.num_encoder_layers": 2}
    name = overrides_of_start(str(folder), runs, both)["start.model"]
    prefix = "bert-2-encoder-layers-as-encoder-decoder-"
    assert name.startswith(prefix)
    # A start that was made under another name before is not made again.
    renamed = f"bert-0123456789abcdef-2-encoder-as-encoder-decoder-{name.removeprefix(prefix)}"
    (runs / "starts" / name).rename(runs / "starts" / renamed)
    assert overrides_of_start(str(folder), runs, both)["start.model"] == renamed


def test_a_run_is_named_by_its_start_and_by_what_was_changed_by_hand(runs):
    experiment = started(runs, "gpt2", **{"model.dropout": 0.25})
    name = experiment.start.model
    expected = {"start.model": name, "model.dropout": 0.25, "tuning.mixtures": TEXT["tuning.mixtures"]}
    assert overrides_of(ROW, "tiny", experiment) == expected
    changes = overrides_of_start(checkpoint(runs, "gpt2"), runs)
    by_hand = {"model.dropout": 0.25, "finetuning.steps": 0}
    assert explicit_overrides(changes | by_hand) == by_hand | {"start.model": name}
    assert command_line_overrides(changes | by_hand) == by_hand
    assert explicit_overrides({"model.d_model": 8}) == {"model.d_model": 8}


def without(name, folder):
    (folder / name).unlink()


def longer(folder):
    """A tokenizer with more ids than the embedding has rows."""
    table = json.loads((folder / "tokenizer.json").read_text())
    table["added_tokens"].append(table["added_tokens"][-1] | {"id": 900, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(table))


def shorter(folder):
    """The tokenizer of a model with a much smaller embedding: one character is all that it reads."""
    table = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in table["added_tokens"]}
    table["model"]["vocab"] = {text: i for text, i in table["model"]["vocab"].items() if text in special}
    table["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: without("tokenizer.json", folder), "tokenizer"),
        (lambda folder: without("config.json", folder), "config.json.*settings.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": '), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json should hold values by name"),
        (lambda folder: without("model.safetensors", folder), "model.safetensors"),
        (shutil.rmtree, "bart"),
        (longer, "tokenizer"),
        (shorter, "tokenizer"),
    ],
)
def test_a_start_that_is_not_whole_is_refused_by_name(runs, tmp_path, spoil, message):
    shutil.copytree(checkpoint(runs, "bart"), tmp_path / "bart")
    spoil(tmp_path / "bart")
    with pytest.raises(SettingError, match=message):
        overrides_of_start(str(tmp_path / "bart"), tmp_path / "runs")
    assert not [*tmp_path.glob("runs/starts/bart*")]


def test_a_start_whose_manifest_is_damaged_is_refused_with_what_to_delete(tmp_path):
    published.write("bart", tmp_path / "bart")
    changes = overrides_of_start(str(tmp_path / "bart"), tmp_path / "runs")
    start = tmp_path / "runs" / "starts" / changes["start.model"]
    (start / "pretraining" / "checkpoints" / "0" / "manifest.json").write_text("{")
    experiment = build("bart/base", "nano", changes | {"pretraining.steps": 2})
    with pytest.raises(SettingError, match=f"delete {start} and import it again with --start"):
        check_start_parameters(experiment, tmp_path / "runs" / "cache")


@pytest.mark.parametrize(
    ("family", "row", "settings", "message"),
    [
        ("bert", ROW, {}, "model.architecture='encoder'"),
        ("gpt2", ROW, {"pretraining.steps": 2}, "sentinels"),
        ("gpt2", "bart/base", {"pretraining.steps": 2}, "mask"),
        ("bert", "t5/1-baseline/baseline", {"pretraining.steps": 2}, "model.architecture='encoder'"),
        ("gpt2", "history/trigram", {}, "counts.model='ngram'"),
        ("gpt2", "electra/base", {"pretraining.steps": 2}, "objective.targets='replaced'.*'decoder'"),
    ],
)
def test_a_start_that_lacks_what_the_row_needs_is_refused(runs, family, row, settings, message):
    experiment = started(runs, family, row, **settings)
    with pytest.raises(SettingError, match=message):
        Run(experiment, runs / "tiny" / "refused", runs / "cache").check(print)


def test_a_setting_that_contradicts_the_checkpoint_is_refused_and_one_of_training_is_not(runs):
    experiment = started(runs, "gpt2")
    check_agreement_with_checkpoint(
        experiment, {"model.dropout": 0.3, "pretraining.steps": 9, "model.d_model": 16}
    )
    for path, value in (("model.d_model", 32), ("data.vocabulary", "bpe"), ("vectors.epochs", 2)):
        with pytest.raises(SettingError, match=f"--{path} {value} contradicts --start"):
            check_agreement_with_checkpoint(experiment, {path: value})


def test_a_checkpoint_of_the_hub_without_a_network_is_an_error_that_says_so(runs, monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SettingError, match="hf:ours/model.*no route to host"):
        overrides_of_start("hf:ours/model", runs)
    there = overrides_of_start(checkpoint(runs, "gpt2"), runs)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(runs / name))
    assert overrides_of_start("hf:gpt2", runs) == there


def test_special_ids_that_config_json_does_not_name_are_the_tokenizers(runs):
    found = {family: started(runs, family).model.special for family in ("gpt2", "llama")}
    assert {name: (x.pad, x.eos, x.start) for name, x in found.items()} == {n: ids_of(n) for n in found}


def test_an_answer_that_would_be_cut_is_refused_with_its_tokens_and_the_room(runs):
    experiment = build(ROW, "tiny", {"tuning.mixtures": ("glue_small",)})
    vocabulary = SimpleNamespace(encode=lambda text: [7] * (90 * (text == "positive")), template=None)
    with pytest.raises(SettingError, match="'positive'.*'sst2'.*'glue_small'"):
        check_answer_lengths(experiment, vocabulary)


def test_a_label_that_the_task_lacks_is_refused_with_those_it_has(runs):
    reader = Reader(
        LABELLED["follows"], load_pretrained_tokenizer(Path(checkpoint(runs, "bert")), 400), "encoder", 60
    )
    with pytest.raises(SettingError, match="'follows'"):
        reader.example({"sentence1": "the cat", "sentence2": "sat", "label": 2})
