"""The phases of pre-training: each is a pre-training of its own, which ends with the phase.

The settings of a phase are those of an experiment whose last phase it is: its objective, its model with the
phase's mask, its last step, and the phases before it. Stages with equal settings share a folder, so that
experiments share phases with each other, and with experiments whose pre-training ends where the phase ends.

Architectures of one stack have the same parameters, and differ in their mask: "encoder", "decoder" and
"prefix-decoder". A phase may train the model of an experiment as another one of these.
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


def with_mask(model: ModelConfig, mask: Mask | None, setting_path: str) -> ModelConfig:
    """Return the model with the same parameters and this mask of self-attention; None: its own mask.

    An encoder with a causal mask stays an encoder, with [CLS] and [SEP] around its texts. A decoder that
    reads both ways is an encoder. ``setting_path`` names the setting of the mask in errors.

    SettingError for an architecture whose mask cannot be changed, and for a mask that the model has already.
    """
    if mask is None:
        return model
    if mask == mask_of(model):
        raise SettingError(f"{setting_path}={mask!r} is the mask that the model has already: leave it out")
    if model.architecture not in SINGLE_STACKS or (model.architecture == "encoder" and mask == "prefix"):
        raise SettingError(
            f"{setting_path}={mask!r} does not suit model.architecture={model.architecture!r}: an encoder "
            "may be 'causal', a decoder of one stack 'causal', 'prefix' or 'bidirectional'; leave it out"
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


def start_model(experiment: Experiment) -> ModelConfig:
    """Return the model of the start, which is that of the first phase.

    For a causal LM an encoder gets a causal mask.
    """
    model = phase_model(experiment, 0)
    if mask_of(model) == "bidirectional" and not experiment.start.objective.has_inputs:
        return with_mask(model, "causal", "start.objective")
    return model


def phase_settings(experiment: Experiment, index: int) -> Experiment:
    """Return the settings by which a phase is trained, as if it were the last phase of an experiment.

    ``pretraining.steps`` is the last step of the phase, ``pretraining.phases`` are the phases before it, and
    model (mask), objective and optimiser are those of the phase.

    index: 0 is the first phase. len(phases) is the last one, whose objective and optimiser are those of
    ``experiment`` itself. An experiment with neither phases nor ``pretraining.mask`` is returned unchanged.
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
    """Return the number of updates before a phase, and the step after its last update."""
    ends = experiment.pretraining.phase_ends
    return ends[index - 1] if index else 0, ends[index]


def branch_step(steps: int, fraction: float) -> int:
    """Return the step that is nearest to a fraction of the ``steps`` of pre-training, at least 1."""
    return max(round(fraction * steps), 1)


def tokens_of_text(experiment: Experiment) -> int:
    """Return how many tokens of text all phases of pre-training read.

    The denoisers of a mixture read the same text, of which each makes its share of the rows. So the one with
    the longest texts determines how much they read.
    """
    total = 0
    for index in range(len(experiment.pretraining.phases) + 1):
        (first, last), phase = phase_steps(experiment, index), phase_settings(experiment, index)
        lengths = pretraining_lengths(phase.objective, phase.model.architecture, phase.data.inputs_length)
        total += (last - first) * phase.pretraining.batch_size * lengths.raw
    return total


def _phase_before(experiment: Experiment, index: int, model: ModelConfig, end: int) -> PretrainingPhase:
    """Return an earlier phase as that of an experiment with ``end`` steps of pre-training and this model.

    Its share is of these steps, and its mask is None if it is the mask of ``model``.
    """
    first, last = phase_steps(experiment, index)
    mask_before = mask_of(phase_model(experiment, index))
    mask = None if mask_before == mask_of(model) else mask_before
    return replace(experiment.pretraining.phases[index], share=(last - first) / end, mask=mask)


def _branches(experiment: Experiment, index: int) -> tuple[float, ...]:
    """Return the fractions of a phase's last step after which the phase keeps a checkpoint.

    It keeps one at each branch of the experiment within the phase. It also keeps one at each branch of an
    experiment whose whole pre-training ends with this phase, since that experiment shares its folder.
    """
    (begin, end), fractions = phase_steps(experiment, index), experiment.tuning.branches
    own_branches = {branch_step(experiment.pretraining.steps, fraction) for fraction in fractions}
    branches_of_shorter = {branch_step(end, fraction) for fraction in fractions}
    kept = sorted(step for step in own_branches | branches_of_shorter if begin < step < end)
    return (*(step / end for step in kept), 1.0)


def _optimizer(experiment: Experiment, index: int) -> OptimizerConfig:
    """Return the optimiser that trains a phase: its own or, without one, that of the next phase that has one.

    Consecutive phases that one optimiser trains share its state and the schedule of its learning rate. The
    schedule counts steps from the beginning of the first of them, and ends with the last.
    """
    pretraining, ends = experiment.pretraining, experiment.pretraining.phase_ends
    optimizers = [*(phase.optimizer for phase in pretraining.phases), pretraining.optimizer]
    own = optimizers[index]
    if own is not None:
        return own  # the phase is the last that it trains, where ``pretraining_spec`` lets the schedule end
    last_phase, optimizer = next(
        (number, each) for number, each in enumerate(optimizers) if number > index and each is not None
    )
    earlier_ends = [ends[number] for number in range(index) if optimizers[number] is not None]
    optimizer_start = max(earlier_ends, default=0)
    return optimizer.ending_at(ends[last_phase] - optimizer_start)


def swap_encoder_and_decoder(name: str) -> str:
    """Return the name of an array of a state, with "encoder" and "decoder" swapped.

    >>> swap_encoder_and_decoder("params.decoder.blocks.mlp.out.kernel")
    'params.encoder.blocks.mlp.out.kernel'
    """
    others = {"encoder": "decoder", "decoder": "encoder"}
    return ".".join(others.get(part, part) for part in name.split("."))


def renaming(saved: ModelConfig, model: ModelConfig) -> Callable[[str], str]:
    """Return the function from the name of an array of ``model`` to its name in a checkpoint of ``saved``.

    Names differ where a decoder continues to train the parameters of an encoder, or an encoder a decoder's.
    """
    return str if saved.has_decoder == model.has_decoder else swap_encoder_and_decoder
