"""Skip-gram (word2vec) over word pieces, whose vectors initialize the embedding of a model."""

import time
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.processes.progress import Reporter
from experiments.runs.inputs import Inputs, sequential_corpus
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import IRRELEVANT_DATA_SETTINGS
from experiments.runs.kinds.stage import TaskScores
from experiments.runs.status import StageLog
from experiments.study.experiment import BASELINE, Experiment, PhaseConfig
from lm import sharding
from lm.classical.word2vec import Tables, initial_tables, mean_loss, rescale_to, train_epoch
from lm.config.base import changes
from lm.data.corpus.token_cache import EncodedDocuments
from lm.nn import elmo
from lm.train.runtime.log import NonFiniteLoss
from lm.train.runtime.preemption import PreemptionHandler
from lm.train.state import State
from lm.train.step import StepSpec

TABLE_NAMES = ("embed.table", "contexts.table")  # skip-gram's, as parameters
# settings of a model that its vectors depend on
MODEL_PATHS = ("vocab_size", "d_model", "embedding.d_embed", "output.logits", "output.transform")


@dataclass(frozen=True)
class SkipGram(NetworkStage):
    """Skip-gram over the word pieces of the corpus; each step is a pass over it and saves a checkpoint."""

    has_text_model: ClassVar[bool] = False
    is_shared: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "skip-gram"

    @property
    def training(self) -> PhaseConfig:
        return PhaseConfig(self.settings.vectors.epochs, save_every=1, keep_hours=0.0, log_every=1)

    @property
    def reads_corpus(self) -> bool:
        return True

    @property
    def relevant_settings(self) -> Experiment:
        return skipgram_settings(self.settings)

    def step_spec(self) -> StepSpec:
        return StepSpec(self.settings.model, module=elmo.SkipGramTables)

    def batches(self, inputs: Inputs) -> None:
        return None

    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        """Train the tables and evaluate them.

        After the last pass, vectors of centres get the root mean square of a new embedding, and those of
        contexts are divided by the same number, so that the products of the two stay.
        """
        config, seed = self.settings.vectors, self.settings.seed
        corpora = sequential_corpus(self.settings, inputs), inputs.validation
        train, held_out = (documents_of(corpus.first(config.tokens)) for corpus in corpora)
        steps = self.steps(mesh)
        with self.checkpoints() as checkpoints, PreemptionHandler(0.0, self.folder) as preemption:
            restored, fresh = checkpoints.restore(steps.abstract), steps.initial_state(seed)
            start = 0 if restored is None else int(restored.step)
            model = self.settings.model
            tables = initial_tables(jax.random.key(seed), model.vocab_size, model.embed_width)
            if restored is not None:
                tables = Tables(*(_local(restored.params[name], mesh) for name in TABLE_NAMES))
            log.resume_after(start)
            reporter.advance(start)
            for epoch in range(start, config.epochs):
                began = time.perf_counter()
                after = preemption.interruptible(partial(train_epoch, tables, train, config, seed, epoch))
                if after is None:
                    checkpoints.wait()  # so that the state that Interrupted names is saved
                    preemption.check(epoch)
                assert after is not None, "only a signal ends a pass, and is raised"
                tables = jax.block_until_ready(after)
                if not all(np.isfinite(table).all() for table in map(np.asarray, tables)):
                    why = f"of vectors.learning_rate={config.learning_rate} and vectors.batch={config.batch}"
                    raise NonFiniteLoss(epoch + 1, f"of skip-gram is not finite: lower one {why}")
                seconds, count = time.perf_counter() - began, sum(map(len, train))
                log.write(epoch + 1, "train", {"seconds_per_step": seconds, "tokens": float(count)})
                if epoch + 1 == config.epochs:
                    tables = rescale_to(tables, fresh.params[TABLE_NAMES[0]])
                log.sync()
                checkpoints.save(_with_tables(fresh, tables, epoch + 1))
                reporter.advance(1)
            checkpoints.wait()
            if not log.has_record(config.epochs, "eval"):
                log.write(config.epochs, "eval", {"loss": mean_loss(tables, held_out, config, seed)})
            preemption.check(config.epochs)

    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        return {}


def skipgram_settings(experiment: Experiment) -> Experiment:
    """Return ``experiment`` with every setting that skip-gram does not depend on reset to the baseline's."""
    kept = {path: attrgetter(path)(experiment.model) for path in MODEL_PATHS}
    data = replace(
        experiment.data, repeats=0, inputs_length=BASELINE.data.inputs_length, **IRRELEVANT_DATA_SETTINGS
    )
    return replace(
        BASELINE,
        model=changes(BASELINE.model, kept),
        data=data,
        vectors=replace(experiment.vectors, embedding=BASELINE.vectors.embedding),
        pretraining=replace(BASELINE.pretraining, steps=0),  # so that no pre-training has the same folder
        seed=experiment.seed,
    )


def documents_of(tokens: EncodedDocuments) -> list[np.ndarray]:
    """Return the ids of each document."""
    return np.split(tokens.tokens, tokens.offsets[1:-1])


def _local(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return all of an array, on this process's first device."""
    return jnp.asarray(np.asarray(jax.device_put(array, sharding.replicated(mesh))))


def _with_tables(state: State, tables: Tables, step: int) -> State:
    """Return ``state`` after ``step``, with these parameters."""
    values = dict(zip(TABLE_NAMES, map(np.asarray, tables), strict=True))
    params = {name: jax.device_put(values[name], like.sharding) for name, like in state.params.items()}
    return replace(state, step=jax.device_put(np.int32(step), state.step.sharding), params=params)
