"""Fine-tuning with a new head that predicts the labels of a task."""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

from jax.sharding import Mesh

from experiments.runs.inputs import EvalSplit, Inputs
from experiments.runs.kinds.answers import make_eval_task, reader_of
from experiments.runs.kinds.finetuning import Finetuning, text_spec
from experiments.runs.kinds.stage import LabelledStage
from experiments.study.experiment import Experiment
from lm.config.base import changes
from lm.config.model import HeadConfig, ModelConfig, Pool
from lm.config.training import Weights
from lm.data.batches import Batches
from lm.data.classification import LabelledRows
from lm.data.tasks.labelled import AnyTask, LabelledTask
from lm.evaluate.evaluator import EvalTask
from lm.nn import elmo, finetune
from lm.nn.transformer import Transformer
from lm.train import optimizers
from lm.train.losses import supervised_loss
from lm.train.step import StepSpec


@dataclass(frozen=True)
class HeadFinetuning(LabelledStage, Finetuning):
    """Fine-tuning of a model with a new head on one labelled task."""

    has_head: ClassVar[bool] = True

    @property
    def transformer_prefix(self) -> str:
        inner = elmo.FORWARD if "backward" in self.settings.model.heads else ""
        return finetune.BODY + inner

    @property
    def model_of_flops(self) -> ModelConfig:
        model = super().model_of_flops
        heads = tuple(head for head in model.heads if head != "query-stream")  # which the head does not read
        return changes(model, {"output.logits": "none", "heads": heads})  # the head costs next to nothing

    def step_spec(self) -> StepSpec:
        return head_spec(self.settings, self.task)

    def batches(self, inputs: Inputs) -> Batches:
        reader = reader_of(self.settings, self.task, inputs.vocabulary)
        rows = inputs.sources.rows(self.task, "train")
        return Batches(LabelledRows(reader, rows, self.settings.seed), self.training.batch_size)

    def eval_tasks(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        length, vocabulary = self.settings.tuning.inputs_length, inputs.vocabulary
        eval_tasks = []
        for task in self.tasks[split]:
            rows = self.scored_rows(task, split, inputs)
            eval_tasks.append(
                make_eval_task(self.settings, vocabulary, mesh, cast(AnyTask, task), rows, length)
            )
        return eval_tasks

    def trained_with_head(self, mesh: Mesh, weights: Weights = "scored") -> finetune.ModelWithHead:
        """Return the trained model with its head, with LoRA merged."""
        model = cast(finetune.ModelWithHead, self.restore_state(mesh, weights=weights).eval_model)
        model.body = finetune.merge_lora(cast(Transformer, model.body))
        return model


def head_spec(experiment: Experiment, task: LabelledTask) -> StepSpec:
    """Return the specification of a step of fine-tuning with a new head for a labelled task.

    It trains the head, and the model below it unless that is frozen (``tuning.layers``).
    """
    spec, head = text_spec(experiment), head_config(experiment, task)
    mask_updates = optimizers.freeze_body if head.layers.endswith("frozen") else spec.mask_updates
    return replace(
        spec,
        loss=supervised_loss,
        module=finetune.ModelWithHead,
        extra_configs=(head,),
        mask_updates=mask_updates,
    )


def head_config(experiment: Experiment, task: LabelledTask) -> HeadConfig:
    """Return the settings of the head for a labelled task."""
    tuning, classes = experiment.tuning, max(len(task.labels), 1)
    head = HeadConfig(kind=task.kind, classes=classes, pool=pooling(experiment), layers=tuning.layers)
    return replace(head, dense=tuning.dense) if head.is_pooled else head


def pooling(experiment: Experiment) -> Pool:
    """Return which positions speak for a text, for heads and for vectors of texts."""
    if experiment.tuning.pool is not None:
        return experiment.tuning.pool
    if "backward" in experiment.model.heads:
        return "mean"  # since no single position has seen the whole text
    return "last" if experiment.model.has_decoder else "first"
