"""The phases of pre-training: each is a pre-training of its own, which ends with the phase.

The settings of a phase are those of an experiment whose last phase it is: its objective, its model with the
phase's mask, its last step, and the phases before it. Stages with equal settings share a folder, so that rows
share phases with each other and with rows whose pre-training ends there.

Architectures of one stack have the same parameters, and differ in their mask: "encoder", "decoder" and
"prefix-decoder". A phase may train the model of a row as another one of these.
"""

from collections.abc import Callable
from dataclasses import replace

from experiments.study.experiment import Experiment, Mask, PretrainingPhase
from lm.config.base import SettingError, changes
from lm.config.model import ModelConfig
from lm.config.training import OptimizerConfig
from lm.data.pretraining import pretraining_lengths

# architectures of one stack
SINGLE_STACKS = ("encoder", "decoder", "prefix-decoder")


def with_mask(model: ModelConfig, mask: Mask | None, named: str) -> ModelConfig:
    """Return the model with the same parameters and this mask of self-attention; None: its own mask.

    An encoder with a causal mask stays an encoder, with [CLS] and [SEP] around its texts. A decoder that
    reads both ways is an encoder. ``named`` names the setting in errors.

    SettingError for an architecture whose mask cannot be changed, and for a mask that the model has already.
    """
    if mask is None:
        return model
    if mask == mask_of(model):
        raise SettingError(f"{named}={mask!r} is the mask that the model has already: leave it out")
    if model.architecture not in SINGLE_STACKS or (model.architecture == "encoder" and mask == "prefix"):
        raise SettingError(
            f"{named}={mask!r} does not suit model.architecture={model.architecture!r}: an encoder may be "
            "'causal', a decoder of one stack 'causal', 'prefix' or 'bidirectional'; leave it out"
        )
    if model.architecture == "encoder":
        encoder_mask = "causal" if mask == "causal" else "none"
        return changes(model, {"attention.encoder_mask": encoder_mask})
    if mask == "bidirectional":
        layers = model.num_decoder_layers
        return changes(model, {"architecture": "encoder", "num_encoder_layers": layers})
    return changes(model, {"architecture": "decoder" if mask == "causal" else "prefix-decoder"})


def mask_of(model: ModelConfig) -> Mask | None:
    """Return the mask of a model of one stack; None for others."""
    if model.architecture == "encoder":
        return "causal" if model.is_causal_encoder else "bidirectional"
    masks: dict[str, Mask] = {"decoder": "causal", "prefix-decoder": "prefix"}
    return masks.get(model.architecture)


def phase_model(experiment: Experiment, index: int) -> ModelConfig:
    """Return the model of a phase of pre-training, counted from 0; the last has the index len(phases)."""
    pretraining = experiment.pretraining
    if index == len(pretraining.phases):
        return with_mask(experiment.model, pretraining.mask, "pretraining.mask")
    mask = pretraining.phases[index].mask
    return with_mask(experiment.model, mask, f"pretraining.phases[{index}].mask")


def phase_settings(experiment: Experiment, index: int) -> Experiment:
    """Return the settings of a pre-training that ends with a phase, counted from 0.

    Those of the last phase have the index len(phases). Without phases and a mask of pre-training they are the
    experiment's.
    """
    pretraining = experiment.pretraining
    if not pretraining.phases and pretraining.mask is None:
        return experiment
    model, (_, end) = phase_model(experiment, index), phase_steps(experiment, index)
    before = tuple(_phase_before(experiment, number, model, end) for number in range(index))
    if index == len(pretraining.phases):
        return replace(experiment, model=model, pretraining=replace(pretraining, phases=before, mask=None))
    return replace(
        experiment,
        model=model,
        objective=pretraining.phases[index].objective,
        pretraining=replace(
            pretraining,
            steps=end,
            phases=before,
            mask=None,
            optimizer=_optimizer(experiment, index),
        ),
        data=replace(experiment.data, held_out_documents=0),
        tuning=replace(experiment.tuning, branches=_branches(experiment, index)),
    )


def phase_steps(experiment: Experiment, index: int) -> tuple[int, int]:
    """Return the step with which a phase begins, and its last one."""
    ends = experiment.pretraining.phase_ends
    return ends[index - 1] if index else 0, ends[index]


def branch_step(experiment: Experiment, fraction: float) -> int:
    """Return the step that is nearest to a fraction of pre-training, at least 1."""
    return max(round(fraction * experiment.pretraining.steps), 1)


def tokens_of_text(experiment: Experiment) -> int:
    """Return how many tokens of text all phases of pre-training read.

    Of a mixture of denoisers it is as many as the one with the longest texts would read alone: each walks
    through the same text, and makes its share of the rows.
    """
    total = 0
    for index in range(len(experiment.pretraining.phases) + 1):
        (first, last), phase = phase_steps(experiment, index), phase_settings(experiment, index)
        lengths = pretraining_lengths(phase.objective, phase.model.architecture, phase.data.inputs_length)
        total += (last - first) * phase.pretraining.batch_size * lengths.raw
    return total


def _phase_before(experiment: Experiment, index: int, model: ModelConfig, end: int) -> PretrainingPhase:
    """Return a phase as a share of the first ``end`` steps, with its mask as seen from ``model``."""
    first, last = phase_steps(experiment, index)
    own = phase_model(experiment, index)
    mask = None if mask_of(own) == mask_of(model) else mask_of(own)
    return replace(experiment.pretraining.phases[index], share=(last - first) / end, mask=mask)


def _branches(experiment: Experiment, index: int) -> tuple[float, ...]:
    """Return after which fractions of a phase's last step checkpoints are kept.

    They are the experiment's branches within the phase, and those of a row that shares the phase as its whole
    pre-training.
    """
    (begin, end), fractions = phase_steps(experiment, index), experiment.tuning.branches
    steps = {branch_step(experiment, fraction) for fraction in fractions}
    steps |= {max(round(fraction * end), 1) for fraction in fractions}
    return (*sorted(step / end for step in steps if begin < step < end), 1.0)


def _optimizer(experiment: Experiment, index: int) -> OptimizerConfig:
    """Return the optimiser of a phase: that of the first phase from it on that names one.

    Its schedule ends with that phase, also if this one ends before.
    """
    phases, ends = experiment.pretraining.phases, experiment.pretraining.phase_ends
    last = next((i for i in range(index, len(phases)) if phases[i].optimizer is not None), len(phases))
    named = phases[last].optimizer if last < len(phases) else None
    optimizer = named or experiment.pretraining.optimizer
    if last == index:
        return optimizer
    begin = max((ends[i] for i in range(index) if phases[i].optimizer is not None), default=0)
    return optimizer.ending_at(ends[last] - begin)


def other_stack(name: str) -> str:
    """Return the name of an array of a state with the encoder called decoder, and the decoder encoder.

    >>> other_stack("params.decoder.blocks.mlp.out.kernel")
    'params.encoder.blocks.mlp.out.kernel'
    """
    others = {"encoder": "decoder", "decoder": "encoder"}
    return ".".join(others.get(part, part) for part in name.split("."))


def renaming(saved: ModelConfig, model: ModelConfig) -> Callable[[str], str]:
    """Return the function from names of ``model``'s arrays to those of a checkpoint of ``saved``."""
    return str if saved.has_decoder == model.has_decoder else other_stack
