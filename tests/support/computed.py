"""What an experiment computes, as digests: its stages, initial parameters, steps, batches and evaluations.

Nothing is compiled: a step is known by its jaxpr, in which every number stands that it computes with.
"""

import hashlib
import re
import typing
from contextlib import contextmanager
from functools import cache
from types import NoneType

import jax
import numpy as np
import small_corpus
from skipgram import train_skipgram
from tiny import TINY

from experiments.runs.inputs import held_out_text, sequential_corpus
from experiments.runs.kinds.counts import Ngrams, Tagger
from experiments.runs.kinds.finetuning import TextFinetuning
from experiments.runs.kinds.head import HeadFinetuning
from experiments.runs.kinds.pretraining import Pretraining, held_out_batches_and_count
from experiments.runs.kinds.vectors import SkipGram, documents_of
from experiments.runs.run import Run
from experiments.study.experiment import Experiment
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.batch import Batch
from lm.config.model import RECURRENT
from lm.train.optimizers import learning_rate, update_direction
from lm.train.step import StepSpec

KINDS = {
    Pretraining: "pretrain",
    TextFinetuning: "text",
    HeadFinetuning: "head",
    Ngrams: "count",
    Tagger: "count",
    SkipGram: "vectors",
}

# A T5, a GPT, a BERT, an LSTM and an n-gram row, as small as they can be, and rows that read more settings.
ROWS = {
    "gpt": ("gpt/base", {"tuning.heads": ("acceptability",)}),
    "lstm": ("history/lstm", {}),
    "bert": ("bert/base", {"tuning.heads": ("acceptability",)}),
    "t5": ("t5/1-baseline/baseline", {}),
    "ngram": ("history/trigram", {}),
}
SCALE = (
    SCALES["nano"]
    | TINY
    | {
        "pretraining.steps": 4,
        "finetuning.steps": 2,
        "finetuning.save_every": 1,
        "tuning.mixtures": ("cloze",),
        "mixing.limit": 100,
        "vectors.tokens": 500,
        "data.vocabulary_size": 350,
    }
)


def built(row):
    """The settings of one of ROWS at scale ``tiny``."""
    name, changes = ROWS[row]
    return build(name, "tiny", changes)


def kind_of(path):
    """The type of a setting."""
    cls = Experiment
    for name in path.split("."):
        cls = typing.get_type_hints(cls)[name]
    return cls


def without_none(kind):
    """The type of what an optional setting is if it is given, and whether it may be None."""
    given = [each for each in typing.get_args(kind) if each is not NoneType]
    return (given[0], True) if NoneType in typing.get_args(kind) else (kind, False)


def computed(experiment, cache):
    """``{what: digest}``; SettingError for a run that cannot be started."""
    run = Run(experiment, cache.parent / "new", cache)
    prepared, mesh, every = run.check(lambda line: None), run.mesh, run.stages
    found = {"stages": digest([described(stage) for stage in every])}
    for stage in every:
        parts = {Ngrams: counted, Tagger: counted, SkipGram: vectors}.get(type(stage), trained)(
            stage, prepared, mesh
        )
        found |= {f"{stage.name}: {name}": value for name, value in parts.items()}
    return found


def described(stage):
    """A stage's place among the others, and when it is looked at."""
    training, settings = stage.training, stage.settings
    looks = settings.pretraining.evaluate_every if stage.is_pretraining else 0
    parent = stage.parent and (stage.parent.name, stage.parent_step)
    names = (stage.name, KINDS[type(stage)], stage.task_names, stage.scored_on, parent, settings.seed)
    return *names, training.steps, training.save_every, looks, stage.branch_steps


@contextmanager
def small_corpus_and_scale(folder):
    """Fill the cache ``folder`` with a small documentation corpus, and add the scale ``tiny`` for a while."""
    small_corpus.prepare(folder)
    SCALES["tiny"] = SCALE
    yield folder
    del SCALES["tiny"]


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def arrays(tree):
    """A digest of arrays by their bytes."""
    leaves = [(np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]
    return digest([(jax.tree.structure(tree), *leaves)])


def trained(stage, prepared, mesh):
    """Of a network: its parameters at the start, its step, its first batches, and what it is evaluated on."""
    batches = prepared.batches[stage.name]
    first = batches(0, slice(0, batches.batch_size))
    shapes = tuple((name, x.shape, str(x.dtype)) for name, x in first.features().items())
    spec = stage.step_spec()
    alone = StepSpec(
        spec.model,
        loss=spec.loss,
        loss_config=spec.loss_config,
        module=spec.module,
        extra_configs=spec.extra_configs,
    )
    found = {"model": model(alone, shapes)}
    found["update"] = digest([update(spec.optimizer), spec.mask_updates, spec.guard.spikes, spec.tbptt])
    found["batch"] = arrays([first.features(), batches(1, slice(0, batches.batch_size)).features()])
    found["loads as"] = digest(stage.settings.model.special)
    for split in ("validation", "report"):
        asked = stage.eval_tasks(prepared, mesh, split)
        found[split] = digest([question(each) for each in asked])
    if stage.is_pretraining and not stage.is_start_pretraining:
        lengths = stage.settings.data.held_out_lengths
        held_out = [
            held_out_batches_and_count(stage.settings, prepared, mesh, times, 1)[0] for times in lengths
        ]
        found["held out"] = digest([arrays(each(0, slice(0, 1)).features()) for each in held_out])
        if stage.settings.data.held_out_documents:
            found["documents"] = digest(held_out_text(stage.settings, prepared))
    return found


def question(asked):
    """Rows, batches and length of the answers of some questions."""
    return (
        asked.task.name,
        len(asked.rows),
        asked.num_rows,
        arrays([batch.features() for batch in asked.batches[:1]]),
        repr(getattr(asked.predict_batch, "keywords", None)),
    )


@cache
def model(spec, shapes):
    """A digest of the initial parameters and of the loss of a spec, for batches of these shapes."""
    key = jax.random.key(0)
    batch = Batch.from_features({name: jax.ShapeDtypeStruct(*each) for name, *each in shapes})

    def mean(params, batch, key):
        return spec.loss(params, batch, key, spec.loss_config)

    if spec.model.mixer.kind in RECURRENT:  # of which some settings are of gradients alone
        mean = jax.grad(mean, has_aux=True)
    initial, parameters = jax.make_jaxpr(spec.make_model, return_shape=True)(key)
    return digest([traced(initial), traced(jax.make_jaxpr(mean)(parameters, batch, key))])


@cache
def update(config):
    """A digest of how an optimiser changes a matrix, a stack of them and a vector at any step."""
    shapes = {"table": (16, 32), "blocks": (2, 16, 32), "scale": (16,)}
    axes = {"table": ("vocab", "embed"), "blocks": ("layers", "embed", "mlp"), "scale": ("norm",)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    transform = update_direction(config, axes)
    memory = jax.eval_shape(transform.init, params)
    rates = [float(learning_rate(config, step)) for step in (0, 1, 2, 3, 10, 100, 25_000)]
    return digest([traced(jax.make_jaxpr(transform.update)(params, memory, params)), rates, config.ema])


def traced(jaxpr):
    """A jaxpr's text without addresses in memory, and its constants."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), arrays(jaxpr.consts)


def vectors(stage, prepared, _mesh):
    """Tables that skip-gram learns from the text."""
    config, model = stage.settings.vectors, stage.settings.model
    text = documents_of(sequential_corpus(stage.settings, prepared).first(config.tokens))
    tables = train_skipgram(text, (model.vocab_size, model.embed_width), config, stage.settings.seed)
    return {"tables": arrays(tuple(tables))}


def counted(stage, prepared, _mesh):
    """The numbers of a model of counts, and what it makes of held-out text."""
    model, _ = stage.estimate(prepared)
    found = {"values": digest(stage.evaluate(model, prepared)), "size": digest(stage.size_of(model))}
    for split in ("validation", "report"):
        rows = [stage.scored_rows(task, split, prepared) for task in stage.tasks[split]]
        found[split] = digest([stage.tags(model, each) for each in rows])
    return found
