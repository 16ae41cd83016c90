"""The settings of training. Importing them needs the standard library alone, so that listing is fast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from lm.config.base import (
    ABOVE_0,
    GIVEN,
    MAX_INT32,
    Condition,
    SettingError,
    check_above_0,
    check_at_least,
    check_at_least_0_below_1,
    check_at_most,
    setting,
)

if TYPE_CHECKING:
    import jax
    import optax

# {parameter name: names of its axes}; "layers" comes first if it is stacked
Axes = Mapping[str, tuple[str, ...]]


class TruncatedBPTT(NamedTuple):
    """Rows that several steps read in chunks, with a recurrent state carried from step to step."""

    rows: int  # per batch
    chunks_per_row: int  # steps per row; then the state is reset


# ``read_if`` of settings: the schedules and optimisers that use them
LATE_DECAYS = ("warmup-stable-decay", "inverse-sqrt-linear")  # schedules that decay from ``decay_start`` on
DECAYS = ("linear", "cosine", *LATE_DECAYS)  # schedules that decay until ``decay_end``
DECAYS_EVERY: Condition = {"schedule": ("decay-every",)}
OF_ADAFACTOR: Condition = {"name": ("adafactor",)}
OF_ADAMW: Condition = {"name": ("adamw", "adamw-relative", "lamb", "muon")}
OF_MUON: Condition = {"name": ("muon",)}
# used by networks only, not by models of counts such as n-grams (``CountsConfig``)
NETWORK: Condition = {"counts.model": ("none",)}


@dataclass(frozen=True)
class SharedOptimizerSettings:
    """Hold the optimiser's name and the settings that all optimisers share.

    These are the learning rate and its schedule, weight decay, gradient clipping and the moving average of
    the parameters.
    """

    # optimiser
    name: Literal[
        "adafactor",
        "adamw",
        "adamw-relative",
        "lamb",
        "muon",
    ] = "adafactor"
    # learning rate, which multiplies the schedule; a step changes a parameter by about this much (adamw), by
    # about this share of its size (adafactor, adamw-relative, lamb), or a matrix by muon_rms times this much
    # (muon: root mean square)
    learning_rate: float = 1.0
    # learning-rate schedule after the warm-up; warmup-stable-decay is constant, then decays linearly;
    # inverse-sqrt-linear is inverse-sqrt times such a decay (Shazeer 2020: over the last tenth)
    schedule: Literal[
        "constant",
        "inverse-sqrt",
        "inverse-sqrt-linear",
        "linear",
        "cosine",
        "decay-every",
        "warmup-stable-decay",
    ] = "inverse-sqrt"
    warmup_steps: int = 0  # length of the linear warm-up from 0; T5 has none [steps]
    # number of steps during which the factor 1 / sqrt(step) of inverse-sqrt stays constant [steps]
    timescale: int = setting(10_000, {"schedule": ("inverse-sqrt", "inverse-sqrt-linear")})
    # step at which warmup-stable-decay and inverse-sqrt-linear begin to decay linearly [steps]
    decay_start: int = setting(0, {"schedule": LATE_DECAYS})
    # step at which the decay ends; linear (T5X: linear_decay) and cosine decay from the end of warm-up,
    # warmup-stable-decay and inverse-sqrt-linear from decay_start on; 0: the last step of training, whatever
    # their number [steps]
    decay_end: int = setting(0, {"schedule": DECAYS})
    # factor of the rate that is left when the decay has ended, such as 0.1
    decay_floor: float = setting(0.0, {"schedule": DECAYS})
    # factor by which decay-every (T5X: decay_every) multiplies the rate each time
    decay_factor: float = setting(0.5, DECAYS_EVERY)
    steps_per_decay: int = setting(20_000, DECAYS_EVERY)  # time between two decays of decay-every [steps]
    weight_decay: float = 0.0  # decoupled weight decay of matrices, multiplied by the learning rate
    clip_norm: float | None = None  # largest global norm of the gradient; None: no clipping
    # decay of an exponential moving average of the parameters, which is evaluated, fine-tuned and exported;
    # 0: no average
    ema: float = 0.0


@dataclass(frozen=True)
class Adafactor:
    """Adafactor as T5 uses it (Shazeer and Stern 2018)."""

    # Adafactor: largest root mean square of a parameter's update; None: no clipping
    clip_rms: float | None = setting(1.0, OF_ADAFACTOR)
    # Adafactor: the mean of squares decays by 1 - step ** -decay_exponent
    decay_exponent: float = setting(0.8, OF_ADAFACTOR)
    # Adafactor: matrices at least this wide are factored into row and column means [features]
    factor_from: int = setting(128, OF_ADAFACTOR)
    epsilon_square: float = setting(1e-30, OF_ADAFACTOR)  # Adafactor: added to squared gradients
    # Adafactor and adamw-relative: lower bound of the size of a parameter to which updates are relative
    epsilon_scale: float = setting(
        1e-3, (OF_ADAFACTOR | {"relative": ("parameter",)}, {"name": ("adamw-relative",)})
    )
    # Adafactor: decay of the mean update (T5X: beta1); 0: no momentum
    momentum: float = setting(0.0, OF_ADAFACTOR)
    # Adafactor: whether the learning rate is relative to the size of a parameter
    relative: Literal["parameter", "none"] = setting("parameter", OF_ADAFACTOR)

    def transform(self, _axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions."""
        import optax

        steps = [
            optax.scale_by_factored_rms(
                decay_rate=self.decay_exponent,
                min_dim_size_to_factor=self.factor_from,
                epsilon=self.epsilon_square,
            )
        ]
        if self.clip_rms is not None:
            steps.append(optax.clip_by_block_rms(self.clip_rms))
        if self.relative == "parameter":
            steps.append(optax.scale_by_param_block_rms(self.epsilon_scale))
        if self.momentum:
            steps.append(optax.ema(self.momentum, debias=False))
        return optax.chain(*steps)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    beta1: float = setting(0.9, OF_ADAMW)  # AdamW: decay of the mean gradient
    beta2: float = setting(0.95, OF_ADAMW)  # AdamW: decay of the mean squared gradient
    epsilon: float = setting(1e-8, OF_ADAMW)  # AdamW: added to the root of the mean squared gradient

    def transform(self, _axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions."""
        import optax

        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True)
class RelativeAdamW(AdamW, Adafactor):
    """AdamW with updates relative to a parameter's size, as Adafactor's are (nanoT5, Nawrot 2023)."""

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions."""
        import optax

        return optax.chain(AdamW.transform(self, axes), optax.scale_by_param_block_rms(self.epsilon_scale))


@dataclass(frozen=True)
class LAMB(AdamW, SharedOptimizerSettings):
    """LAMB: an update of AdamW, decay included, is scaled to the norm of its matrix (You et al. 2020).

    The paper adapts all parameters. As in the code of BERT and ALBERT, biases and norms do not decay and are
    not adapted.
    """

    adds_weight_decay: ClassVar[bool] = True  # before the update is scaled

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions, with weight decay."""
        import optax

        def matrices(params: Mapping[str, Any]) -> dict[str, bool]:
            return {name: is_matrix(axes[name]) for name in params}

        return optax.chain(
            AdamW.transform(self, axes),
            optax.add_decayed_weights(self.weight_decay, matrices),
            optax.masked(optax.scale_by_trust_ratio(), matrices),
        )


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon: updates of layers' matrices are the orthogonal matrix nearest to a mean gradient (Jordan 2024).

    Embeddings, output matrices, heads, norms, biases, tables of relative positions, values of product-key
    memories, logits that are parameters and kernels of convolutions are updated by AdamW.
    """

    muon_momentum: float = setting(0.95, OF_MUON)  # Muon: decay of the mean gradient of a matrix
    # Muon: root mean square of a matrix's update, about that of AdamW, so that one learning rate serves both
    # (Liu et al. 2025)
    muon_rms: float = setting(0.2, OF_MUON)

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions; of arrays [...,rows,columns] by matrix."""
        import optax

        # The nearest orthogonal matrix is the same for any multiple, so optax's momentum may be a sum.
        momentum = optax.trace(self.muon_momentum, nesterov=True)
        matrices = optax.chain(momentum, optax.stateless(self._orthogonal))
        kinds = {n: "matrix" if _multiplies_features(names) else "other" for n, names in axes.items()}
        transforms = {"matrix": matrices, "other": AdamW.transform(self, axes)}
        return optax.partition(transforms, lambda params: {name: kinds[name] for name in params})

    def _orthogonal(self, updates: "dict[str, jax.Array]", _params: Any) -> "dict[str, jax.Array]":
        import jax
        from optax.contrib import MuonDimensionNumbers, scale_by_muon

        last_two = MuonDimensionNumbers(-2, -1)
        nearest = scale_by_muon(
            beta=0.0,
            nesterov=False,
            weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: last_two, updates),
        )
        directions, _ = nearest.update(updates, nearest.init(updates))
        # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side).
        return jax.tree.map(lambda x: self.muon_rms * max(x.shape[-2:]) ** 0.5 * x, directions)


def is_matrix(names: tuple[str, ...]) -> bool:
    """Return whether a parameter with these axes is a matrix in each layer, or in each expert of it."""
    own = tuple(name for name in names if name not in ("layers", "experts"))
    return len(own) > 1 and own != ("heads", "kv")  # those are biases: a vector for each head


def _multiplies_features(names: tuple[str, ...]) -> bool:
    """Return whether a parameter with these axes is a layer's matrix from features to others.

    A table of rows to look up is none, nor are vectors of each head and logits of its positions, nor a kernel
    with a number for each tap and feature.
    """
    own = tuple(name for name in names[1:] if name not in ("experts", "bias_heads", "taps"))
    is_table = not {"buckets", "memory"}.isdisjoint(own)
    is_of_heads = own[-2:] == ("heads", "kv") or own[:2] == ("heads", "length")
    return names[:1] == ("layers",) and len(own) > 1 and not is_table and not is_of_heads


OPTIMIZERS = {  # by ``SharedOptimizerSettings.name``
    "adafactor": Adafactor,
    "adamw": AdamW,
    "adamw-relative": RelativeAdamW,
    "lamb": LAMB,
    "muon": Muon,
}


# Inherits the settings of all optimisers, so that each has a flat name, such as ``optimizer.beta1``. A new
# optimiser is a dataclass with ``transform``, in OPTIMIZERS and in ``SharedOptimizerSettings.name``. With
# settings of its own it is also the first base class here.
@dataclass(frozen=True)
class OptimizerConfig(
    Muon,
    RelativeAdamW,
    SharedOptimizerSettings,
):
    """The optimiser and all of its settings: Adafactor as in T5, AdamW, LAMB, or Muon."""

    def __post_init__(self):
        if self.decays and 0 != self.decay_end <= self._decay_begin:
            start = "decay_start" if self.schedule in LATE_DECAYS else "warmup_steps"
            raise SettingError(
                f"optimizer.decay_end={self.decay_end} should be beyond optimizer.{start}="
                f"{self._decay_begin} for the schedule {self.schedule!r}, or 0 for the last step"
            )
        positive = (
            "learning_rate timescale decay_exponent factor_from decay_factor muon_rms clip_norm clip_rms"
        )
        check_above_0(self, "optimizer.", f"{positive} epsilon epsilon_square epsilon_scale")
        check_at_least(self, "optimizer.", warmup_steps=0, decay_start=0, weight_decay=0, steps_per_decay=1)
        most = dict.fromkeys(
            ("warmup_steps", "decay_start", "decay_end", "timescale", "steps_per_decay"), MAX_INT32
        )
        check_at_most(self, "optimizer.", factor_from=MAX_INT32, **most)
        check_at_least_0_below_1(self, "optimizer.", "beta1 beta2 momentum muon_momentum ema decay_floor")

    @property
    def decays(self) -> bool:
        """Return whether the rate decays until a step."""
        return self.schedule in DECAYS

    @property
    def _decay_begin(self) -> int:
        return self.decay_start if self.schedule in LATE_DECAYS else self.warmup_steps

    def check_decay_start(self, name: str = "optimizer") -> None:
        """Raise SettingError for a late decay that begins before the warm-up ends.

        ``name`` is the path of these settings. It is not checked with the others, since a row may set both
        steps as shares, one after the other.
        """
        if self.schedule in LATE_DECAYS and self.decay_start < self.warmup_steps:
            raise SettingError(
                f"{name}.decay_start={self.decay_start} should be at least {name}.warmup_steps="
                f"{self.warmup_steps} for the schedule {self.schedule!r}, whose rate would decay while it "
                "warms up: name the step at which the decay begins"
            )

    def ending_at(self, steps: int) -> "OptimizerConfig":
        """Return the optimiser of a training of so many steps: ``decay_end`` is their number if it is 0.

        Raises SettingError for a late decay that begins before the warm-up ends.
        """
        self.check_decay_start()
        if not self.decays or self.decay_end:
            return self
        return replace(self, decay_end=max(steps, self._decay_begin + 1))

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Return the transformation from gradients to directions of the optimiser ``name``."""
        chosen: Any = OPTIMIZERS[self.name]
        return chosen.transform(self, axes)


@dataclass(frozen=True)
class LossConfig:
    """The loss of target tokens in training. Evaluations measure their cross-entropy, whatever this is."""

    name: Literal["cross-entropy"] = "cross-entropy"  # loss of a target token
    z_loss: float = 1e-4  # weight of the squared log-partition function, which is added to the loss (T5)
    # label smoothing: probability taken from the target and spread evenly over all other tokens
    label_smoothing: float = setting(0.0, {"name": ("cross-entropy",)})

    def __post_init__(self):
        check_at_least(self, "loss.", z_loss=0)
        if not 0 <= self.label_smoothing < 1:
            raise SettingError(
                f"loss.label_smoothing={self.label_smoothing} should be at least 0 and below 1, such as 0.1"
            )


@dataclass(frozen=True)
class DistillationConfig:
    """Pre-training with a teacher's predictions beside the targets [Hinton et al. 2015; Sanh et al. 2019].

    The loss is the weighted sum of three terms, each a mean over the targets of the objective. The default
    weights and temperature are those of DistilBERT.
    """

    # model that teaches: a folder in the format of transformers, a run, RUN:STAGE, or hf:NAME; a copy of it
    # is kept in the folder `starts` beside the runs, and this is then the name of the copy
    teacher: str = ""
    # weight of the cross-entropy with the teacher's probabilities
    soft: float = setting(5.0, {"teacher": GIVEN})
    # weight of the objective's own loss
    hard: float = setting(2.0, {"teacher": GIVEN})
    # weight of the cosine distance from the teacher's last hidden states, which need the same width
    cosine: float = setting(1.0, {"teacher": GIVEN})
    # temperature by which the logits of both are divided before the softmax
    temperature: float = setting(2.0, {"teacher": GIVEN, "soft": ABOVE_0})

    def __post_init__(self):
        check_at_least(self, "distillation.", soft=0, hard=0, cosine=0)
        check_above_0(self, "distillation.", "temperature")
        if PurePath(self.teacher).name != self.teacher or self.teacher == "..":
            raise SettingError(
                f"distillation.teacher={self.teacher!r} should be the name of a folder in starts; the option "
                "--distillation.teacher PATH makes one"
            )
        if self.teacher and not (self.soft or self.hard or self.cosine):
            raise SettingError(
                "distillation.soft, .hard and .cosine are 0, which leaves no loss: set one of them above 0"
            )

    @property
    def needs_teacher_forward(self) -> bool:
        """Return whether the loss depends on the teacher."""
        return self.soft > 0 or self.cosine > 0


# Which parameters of a checkpoint to use: the last, their average (optimizer.ema), or as scored, that is the
# average if one is kept.
Weights = Literal["scored", "average", "last"]


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and which checkpoints are kept."""

    every: int = 5_000  # time between two checkpoints; the last step is always saved [steps]
    keep: int = 3  # number of newest checkpoints to keep [checkpoints]
    # whether the lowest or the highest value of a score is best; the best checkpoint by each score is kept
    # as well as the newest ones
    best: Literal["lowest", "highest"] = "lowest"
    hours: float = 1.0  # keep one checkpoint of each period of this length too; 0: none [hours]
    steps: tuple[int, ...] = ()  # save and evaluate at these steps too, and keep their checkpoints [steps]

    def __post_init__(self):
        check_at_least(self, "checkpoints.", every=1, keep=1, hours=0)

    def due(self, step: int) -> bool:
        """Return whether the state after ``step`` is saved."""
        return step % self.every == 0 or step in self.steps


@dataclass(frozen=True)
class GuardConfig:
    """Say how a run reacts to bad updates and to saves that fail.

    A skipped update leaves the parameters and the optimiser's state as they are, bit for bit. Losses and
    gradient norms of all steps are read only with each line of the log, and before each checkpoint and each
    evaluation. After a bad update a run therefore goes on until they are read, and then ends without saving.
    """

    # whether a loss or gradient that is not finite stops the run or skips the update
    non_finite: Literal["stop", "skip"] = "stop"
    # skip updates whose loss is so many standard deviations above the mean of the last 128; None: no limit
    # [standard deviations]
    spikes: float | None = setting(None, NETWORK)
    in_a_row: int = 10  # number of consecutive skipped updates that ends the run [steps]
    # whether a checkpoint that cannot be saved stops the run, or is retried with the next one
    failed_save: Literal["stop", "retry"] = "stop"

    def __post_init__(self):
        if self.spikes is not None and not self.spikes > 0:
            raise SettingError(f"guard.spikes={self.spikes} should be above 0, such as 6.0, or None")
        check_at_least(self, "guard.", in_a_row=1)

    @property
    def skips(self) -> bool:
        """Return whether an update may be skipped."""
        return self.non_finite == "skip" or self.spikes is not None


NEVER_SKIP = GuardConfig()


@dataclass(frozen=True)
class LoopConfig:
    """Say how long to train, and how often to log and evaluate."""

    steps: int = 524_288  # train until the state has this step [steps]
    log_every: int = 100  # time between two lines of metrics.jsonl [steps]
    # time between two evaluations; the last step is always evaluated [steps]
    evaluate_every: int = 5_000
    score: str = "loss"  # metric by which checkpoints are ranked
    guard: GuardConfig = NEVER_SKIP
    # end the process after so long without a step or evaluation batch; 0: never [seconds]
    patience: float = 0.0
    profile: tuple[int, int] | None = None  # first and last step to trace; None: no trace
    prefetch: int = 2  # number of batches to copy to the devices ahead of their step [batches]

    def __post_init__(self):
        check_at_least(self, "", steps=0, log_every=1, evaluate_every=1, patience=0, prefetch=0)
        if self.profile is not None and not 0 <= self.profile[0] <= self.profile[1]:
            raise SettingError(
                f"profile={self.profile} should be the first and the last of one or more steps, or None"
            )
