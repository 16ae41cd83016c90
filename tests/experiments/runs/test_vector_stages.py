"""Laws of skip-gram as a stage of a run, as whose vectors the embedding starts."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_corpus
from tiny import TINY

from experiments.cli.draw import neighbours
from experiments.runs.checks import check_device_memory
from experiments.runs.kinds import vectors as skipgram
from experiments.runs.kinds.vectors import SkipGram
from experiments.runs.result import read_result
from experiments.runs.run import Run
from experiments.runs.stages import stages, stages_of
from experiments.runs.trained import generative_stages, open_run
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm import sharding
from lm.classical.word2vec import Pairs, Tables, _softmax_update, rescale_to
from lm.config.base import SettingError
from lm.nn.finetune import source_parameter
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import Checkpoints, SaveError
from lm.train.runtime.log import NonFiniteLoss
from lm.train.runtime.preemption import Interrupted
from lm.train.runtime.records import records

ROW = "vectors/window+vectors"
# Batches are small since words of a small vocabulary are frequent, and the model moves from the first step.
BRIEF = {"vectors.epochs": 2, "vectors.batch": 16, "pretraining.optimizer.warmup_steps": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that holds a small documentation corpus; and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs") / "cache"
    small_corpus.prepare(folder)
    SCALES["tiny"] = SCALES["nano"] | TINY | {"pretraining.steps": 2, "vectors.tokens": 20_000}
    yield folder
    del SCALES["tiny"]


class Silent:
    """A reporter that is not told in vain, but shows nothing."""

    def __getattr__(self, _name):
        return lambda *_: None


def tiny(row=ROW, **changes):
    return build(row, "tiny", BRIEF | changes)


def trained_run(cache, name, experiment):
    folder = cache.parent / "tiny" / name
    Run(experiment, folder, cache).train(Silent())
    return folder, stages_of(folder)


def params(stage):
    state = stage.restore_state(sharding.make_mesh(stage.settings.mesh))
    return {name: np.asarray(value) for name, value in state.params.items()}


@pytest.fixture(scope="module")
def finished(cache):
    return trained_run(cache, "whole", tiny())


def vectors_of(row, **changes):
    (stage,) = (x for x in stages(build(row, "nano", changes)) if isinstance(x, SkipGram))
    return stage.folder


def pretraining_of(row, **changes):
    (stage,) = (x for x in stages(build(row, "nano", changes)) if x.is_pretraining)
    return stage.folder


def test_rows_of_one_vocabulary_and_width_share_vectors_whatever_reads_them():
    rows = (
        "vectors/window+vectors",
        "vectors/window+frozen-vectors",
        "vectors/lstm+vectors",
        "vectors/negative",
    )
    assert len({vectors_of(row) for row in rows}) == 1
    assert len({pretraining_of(row) for row in rows[:3]}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"vectors.negatives": 0},
        {"vectors.window": 2},
        {"vectors.epochs": 3},
        {"vectors.tokens": 100},
        {"model.d_model": 32},
        {"data.corpus": "text:a"},
        {"seed": 1},
    ],
    ids=str,
)
def test_vectors_and_the_pretraining_from_them_depend_on_all_that_shapes_them(changes):
    assert vectors_of(ROW) != vectors_of(ROW, **changes)
    assert pretraining_of(ROW) != pretraining_of(ROW, **changes)


def test_what_starts_at_random_lies_where_it_lay_whatever_vectors_would_be():
    assert pretraining_of("vectors/window", **{"vectors.window": 2}) == pretraining_of("vectors/window")
    assert pretraining_of("vectors/window") != pretraining_of(ROW)


def test_vectors_come_first_then_the_start_then_pretraining_of_every_member():
    changes = {"vectors.epochs": 1, "start.steps": 3}
    every = stages(build("t5/13-scaling/ensemble", "nano", changes))
    order = list(dict.fromkeys(stage.name_without_member for stage in every))
    assert order[:3] == ["vectors", "start", "pretraining"]
    for stage in every:
        assert stage.parent is None or every.index(stage.parent) < every.index(stage)
    assert len({stage.folder for stage in every if isinstance(stage, SkipGram)}) == 4


def test_without_pretraining_the_tasks_start_from_the_vectors():
    vectors, *heads = stages(build("elmo/lstm-no-pretraining", "nano", {"vectors.epochs": 2}))
    assert heads and all(stage.parent == vectors and stage.parent_step == 2 for stage in heads)


def test_the_size_of_an_embedding_leaves_the_products_of_centres_and_contexts_as_they_are():
    keys = jax.random.split(jax.random.key(0), 3)
    tables = Tables(0.01 * jax.random.normal(keys[0], (9, 4)), jax.random.normal(keys[1], (9, 4)))
    like = 3 * jax.random.normal(keys[2], (9, 4))
    sized = rescale_to(tables, like)
    np.testing.assert_allclose(
        sized.centres @ sized.contexts.T, tables.centres @ tables.contexts.T, rtol=1e-4
    )
    assert jnp.square(sized.centres).mean() == pytest.approx(float(jnp.square(like).mean()), rel=1e-5)


@pytest.mark.parametrize("place", ["", "forward.", "discriminator.", "body.", "body.forward."])
def test_vectors_start_the_embedding_wherever_it_is_in_a_model_and_nothing_else(place):
    learnt = {"embed.table", "contexts.table"}
    assert source_parameter(learnt, f"{place}embed.table") == "embed.table"
    assert source_parameter(learnt, f"{place}decoder.norm.scale") is None


@pytest.mark.slow
def test_pretraining_starts_from_the_vectors_in_the_size_of_a_new_embedding(finished):
    vectors, pretraining = finished[1]
    mesh = sharding.make_mesh(pretraining.settings.mesh)
    steps = pretraining.steps(mesh)
    fresh, state = (
        steps.initial_state(0),
        vectors.initial_state_from_checkpoint(steps, pretraining.parent_step),
    )
    table, new = (np.asarray(x.params["embed.table"]) for x in (state, fresh))
    np.testing.assert_array_equal(table, params(vectors)["embed.table"])
    assert np.square(table).mean() == pytest.approx(np.square(new).mean(), rel=1e-5)
    others = [name for name in state.params if name != "embed.table"]
    assert all((np.asarray(state.params[name]) == np.asarray(fresh.params[name])).all() for name in others)
    assert (params(pretraining)["embed.table"] != table).any()


def test_frozen_vectors_stay_bit_for_bit_and_all_else_is_trained(cache, finished):
    _, (vectors, pretraining) = trained_run(cache, "frozen", tiny("vectors/window+frozen-vectors"))
    assert vectors == finished[1][0]
    before, after = params(vectors)["embed.table"], params(pretraining)
    np.testing.assert_array_equal(after["embed.table"], before)
    steps = pretraining.steps(sharding.make_mesh(pretraining.settings.mesh))
    fresh = vectors.initial_state_from_checkpoint(steps, 2).params
    assert {name for name in after if (after[name] == np.asarray(fresh[name])).all()} == {"embed.table"}


def test_vectors_that_were_interrupted_go_on_as_if_they_were_not(cache, finished, monkeypatch):
    def stopped(tables, texts, config, seed, epoch):
        if epoch:
            raise KeyboardInterrupt
        return whole(tables, texts, config, seed, epoch)

    whole = skipgram.train_epoch
    experiment, folder = tiny("vectors/negative"), cache.parent / "other" / "again"
    monkeypatch.setattr(skipgram, "train_epoch", stopped)
    with pytest.raises(KeyboardInterrupt):
        Run(experiment, folder, cache).train(Silent())
    (stage,) = stages_of(folder)
    assert [line["step"] for line in records(stage.folder)] == [1]
    monkeypatch.setattr(skipgram, "train_epoch", whole)
    Run(experiment, folder, cache).train(Silent())
    assert stage.folder != finished[1][0].folder
    for name, value in params(finished[1][0]).items():
        np.testing.assert_array_equal(params(stage)[name], value)
    kinds = [(line["step"], line["kind"]) for line in records(stage.folder)]
    assert kinds == [(1, "train"), (2, "train"), (2, "eval")]


def test_a_signal_in_the_evaluation_of_vectors_is_not_lost(cache, monkeypatch):
    def stop(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return mean_loss(*arguments)

    mean_loss = skipgram.mean_loss
    monkeypatch.setattr(skipgram, "mean_loss", stop)
    with pytest.raises(Interrupted, match="after step 1, which is saved"):
        trained_run(cache, "stopped", tiny("vectors/negative", **{"vectors.epochs": 1}))


def test_vectors_that_could_not_be_saved_are_not_said_to_be(cache, monkeypatch):
    def stop_later(tables, texts, config, seed, epoch):
        if epoch:
            os.kill(os.getpid(), signal.SIGINT)
        return train_epoch(tables, texts, config, seed, epoch)

    def fail(*_):
        raise PermissionError("read-only")

    train_epoch = skipgram.train_epoch
    monkeypatch.setattr(skipgram, "train_epoch", stop_later)
    monkeypatch.setattr(manifest, "publish", fail)
    with pytest.raises(SaveError, match="step 1 could not be saved"):
        trained_run(cache, "unsaved", tiny("vectors/negative", seed=1))


def test_vectors_are_saved_only_once_their_record_is_durable(cache, monkeypatch):
    def sync(file):
        fsync(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    def check_and_save(self, state):
        record = (self.folder.parent / "metrics.jsonl").stat()
        durable.append(synced.get(record.st_ino) == record.st_size)
        save(self, state)

    synced, durable, fsync, save = {}, [], os.fsync, Checkpoints.save
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Checkpoints, "save", check_and_save)
    trained_run(cache, "durable", tiny("vectors/negative", seed=2))
    assert durable == [True, True]


def test_a_run_of_vectors_alone_ends_with_its_cost_and_has_no_model(cache, capsys):
    folder, (stage,) = trained_run(cache, "alone", tiny("vectors/negative"))
    result = read_result(folder)
    assert result.seconds > 0 and result.held_out_loss is None and result.tokens == 2 * 20_000
    with pytest.raises(SettingError, match="pretraining.steps"):
        open_run(folder, generative_stages(folder))
    neighbours(folder, ("the", "of"), count=3)
    which, *lines = capsys.readouterr().out.splitlines()
    assert which == f"{folder} after vectors"
    assert [line.split()[0] for line in lines] == ["\u2581the", "\u2581of"]
    assert all(len(line.split()) == 1 + 2 * 3 for line in lines)
    with pytest.raises(SettingError, match="'thex'"):
        neighbours(folder, ("thex",))
    with pytest.raises(SettingError, match="^--stage 'vector' is no part of .*; did you mean 'vectors'"):
        neighbours(folder, ("the",), stage="vector")


def test_the_embedding_of_a_model_has_neighbours_too(finished, capsys):
    folder, _ = finished
    for stage in ("", "pretraining"):
        neighbours(folder, ("the",), count=200, stage=stage)
    said, vectors, other, model = capsys.readouterr().out.splitlines()
    assert (
        said == f"{folder} after vectors (its other models: --stage pretraining)"
        and "after pretraining" in other
    )
    assert vectors != model


@pytest.mark.parametrize(("batch", "width"), [(256, 64), (1_024, 256)])
def test_a_full_softmax_is_refused_only_for_a_batch_that_memory_does_not_hold(batch, width, monkeypatch):
    changes = {"vectors.epochs": 1, "vectors.negatives": 0, "vectors.batch": batch, "model.d_model": width}
    experiment = build(ROW, "nano", changes)
    words, contexts = experiment.model.vocab_size, (batch, 2 * experiment.vectors.window)
    table, ids = np.zeros((words, width), np.float32), np.zeros(contexts, np.int32)
    pairs = Pairs(ids[:, 0], ids, np.zeros(contexts, np.float32), ids[:, :0])
    update = jax.jit(_softmax_update, donate_argnums=0).lower(Tables(table, table), pairs, np.float32(0))
    measured = update.compile().memory_analysis().temp_size_in_bytes
    sizes = experiment.mesh.sizes(1)
    monkeypatch.setattr("experiments.runs.checks.device_memory", lambda: 2 * measured)
    check_device_memory(experiment, sizes)
    monkeypatch.setattr("experiments.runs.checks.device_memory", lambda: measured - 1)
    with pytest.raises(SettingError, match=r"vectors\.negatives=0 need"):
        check_device_memory(experiment, sizes)


def test_tables_that_diverge_are_not_saved_and_the_settings_to_lower_are_named(cache):
    experiment = tiny("vectors/negative", **{"vectors.learning_rate": 1e4})
    with pytest.raises(NonFiniteLoss, match="vectors.learning_rate=10000.0"):
        trained_run(cache, "diverging", experiment)
    (stage,) = stages_of(cache.parent / "tiny" / "diverging")
    assert not manifest.steps(stage.folder / "checkpoints")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vectors.negatives": -1}, "vectors.negatives=-1"),
        ({"vectors.epochs": -1}, "vectors.epochs=-1"),
        ({"vectors.tokens": 0}, "vectors.tokens=0"),
        ({"vectors.embedding": "frozen"}, "vectors.embedding='frozen'.*vectors.epochs"),
    ],
)
def test_settings_of_vectors_without_sense_are_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        build("vectors/window", "nano", changes)
