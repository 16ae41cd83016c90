"""Fine-tuning: what all of it has in common, and fine-tuning to answer tasks by generated text."""

from dataclasses import dataclass
from typing import ClassVar

from jax.sharding import Mesh

from experiments.runs.inputs import EvalSplit, Inputs, encoded_tasks, mixture_lengths
from experiments.runs.kinds.answers import text_eval_tasks
from experiments.runs.kinds.network import NetworkStage
from experiments.study.experiment import Experiment, PhaseConfig
from lm.config.base import changes
from lm.data.batches import Batches
from lm.data.seq2seq import MixtureRows
from lm.data.tasks.mixtures import mixing_rates
from lm.evaluate.evaluator import EvalTask
from lm.objectives.denoising import Lengths
from lm.special_tokens import boundary_tokens
from lm.train import optimizers
from lm.train.step import StepSpec


@dataclass(frozen=True)
class Finetuning(NetworkStage):
    """Fine-tuning on downstream tasks, answered by generated text or by a new head."""

    @property
    def title(self) -> str:
        return f"fine-tuning on {self.name_without_member}"

    @property
    def training(self) -> PhaseConfig:
        return self.settings.finetuning


@dataclass(frozen=True)
class TextFinetuning(Finetuning):
    """Fine-tuning on the tasks of a mixture, which are answered by generated text."""

    writes_answers: ClassVar[bool] = True

    @property
    def lengths(self) -> Lengths:
        return mixture_lengths(self.settings, self.task_names)

    @property
    def transformer_prefix(self) -> str:
        return ""  # only the Transformer is trained, without ELECTRA's generator and ELMo's backward model

    def step_spec(self) -> StepSpec:
        return text_spec(self.settings)

    def batches(self, inputs: Inputs) -> Batches:
        settings, examples = self.settings, encoded_tasks(self.task_names, inputs)
        sizes = {task: len(rows) for task, rows in examples.items()}
        limit = settings.tuning.examples_limit
        rates = mixing_rates(sizes, kind="proportional", limit=limit, temperature=1.0)
        boundary = boundary_tokens(settings.model, inputs.vocabulary)
        rows = MixtureRows(
            examples,
            rates,
            settings.model.architecture,
            self.lengths,
            settings.seed,
            boundary,
            pad_to_multiple_of=settings.model.funnel.multiple,
            loss=settings.tuning.loss,
        )
        return Batches(rows, self.training.batch_size)

    def eval_tasks(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        return text_eval_tasks(self, inputs, mesh, split)


def text_spec(experiment: Experiment) -> StepSpec:
    """Return the specification of a step of fine-tuning.

    It trains all parameters; with ``tuning.adapters`` the adapters and all norms; with ``tuning.lora`` the
    low-rank updates; with tuning.unfreezing="gradual" the top layers first. All of them also train a new
    head, where ``head_spec`` adds one.
    """
    model, training, tuning = experiment.model, experiment.finetuning, experiment.tuning
    mask_updates: optimizers.MaskUpdates = optimizers.train_all
    if tuning.adapters:
        mask_updates = optimizers.train_adapters
    elif tuning.lora.rank:
        mask_updates = optimizers.train_lora
    elif tuning.unfreezing == "gradual":
        mask_updates = optimizers.GradualUnfreezing(model, training.steps)
    adapter_width = round(tuning.adapters * model.d_model)
    model = changes(model, {"mlp.adapter_width": adapter_width, "lora": tuning.lora})
    return StepSpec(
        model,
        training.optimizer.ending_at(training.steps),
        loss_config=training.loss,
        mask_updates=mask_updates,
        microbatches=training.microbatches,
        guard=experiment.guard,
    )
