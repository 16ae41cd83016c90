"""The settings of training; only the standard library, so that listing experiments needs no jax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lm.settings import SettingError, at_least

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class Schedule:
    """Which optimiser, and what all optimisers share: the course of the learning rate, decay and clipping."""

    name: Literal["adafactor", "adamw"] = "adafactor"  # which optimiser
    learning_rate: float = 1.0  # multiplies the schedule; of Adafactor, relative to each parameter's own size
    # course of the learning rate after the ramp
    schedule: Literal["constant", "inverse-sqrt", "linear", "cosine", "decay-every"] = "inverse-sqrt"
    warmup_steps: int = 0  # ramp from 0 that multiplies the schedule; T5 has none [steps]
    timescale: int = 10_000  # "inverse-sqrt" is 1 / sqrt(max(step, timescale)) [steps]
    # where "linear" (T5X: linear_decay) and "cosine", begun at the ramp's end, reach 0 [steps]
    decay_end: int = 0
    decay_factor: float = 0.5  # what "decay-every" (T5X: decay_every) multiplies the rate by, again and again
    steps_per_decay: int = 20_000  # from the first step on, in what time "decay-every" does so once [steps]
    weight_decay: float = 0.0  # share of each matrix taken off in a step, times the learning rate
    clip_norm: float | None = None  # longest gradient, over all parameters together; None: any


@dataclass(frozen=True)
class Adafactor:
    """Adafactor as T5 uses it (Shazeer and Stern 2018)."""

    clip_rms: float | None = 1.0  # Adafactor: largest root mean square of one parameter's update; None: any
    decay_exponent: float = 0.8  # Adafactor: the mean of squares forgets with 1 - step ** -decay_exponent
    factor_from: int = 128  # Adafactor: matrices at least so wide keep row and column means only [features]
    epsilon_square: float = 1e-30  # Adafactor: added to squared gradients
    epsilon_scale: float = 1e-3  # Adafactor: smallest size a parameter counts with
    # Adafactor: how much of the mean update a step keeps (T5X: beta1); 0: nothing is remembered
    momentum: float = 0.0
    relative: Literal["parameter", "none"] = "parameter"  # Adafactor: what the learning rate is relative to

    def transform(self) -> "optax.GradientTransformation":
        """Directions from gradients."""
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

    beta1: float = 0.9  # AdamW: how much of the mean gradient a step keeps
    beta2: float = 0.95  # AdamW: how much of the mean squared gradient a step keeps
    epsilon: float = 1e-8  # AdamW: added to the root of the mean squared gradient

    def transform(self) -> "optax.GradientTransformation":
        """Directions from gradients."""
        import optax

        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)


OPTIMIZERS = {"adafactor": Adafactor, "adamw": AdamW}  # by ``Schedule.name``


# Inherits the settings of all optimisers, so that each has a flat name, such as ``optimizer.beta1``. A new
# optimiser is a dataclass with ``transform``: first base class here, in OPTIMIZERS and in ``Schedule.name``.
@dataclass(frozen=True)
class OptimizerConfig(AdamW, Adafactor, Schedule):
    """How parameters change: by Adafactor as in T5, or by AdamW."""

    def __post_init__(self):
        if self.schedule in ("linear", "cosine") and self.decay_end <= self.warmup_steps:
            raise SettingError(
                f"optimizer.decay_end={self.decay_end} should be beyond optimizer.warmup_steps="
                f"{self.warmup_steps} for the schedule {self.schedule!r}"
            )
        for name in ("learning_rate", "timescale", "decay_exponent", "factor_from", "decay_factor"):
            if getattr(self, name) <= 0:
                raise SettingError(f"optimizer.{name}={getattr(self, name)} should be above 0")
        at_least(self, "optimizer.", warmup_steps=0, weight_decay=0, steps_per_decay=1)
        if not 0 <= self.momentum < 1:
            raise SettingError(
                f"optimizer.momentum={self.momentum} should be at least 0 and below 1, such as 0.9"
            )

    def transform(self) -> "optax.GradientTransformation":
        """The directions of the optimiser that ``name`` names."""
        chosen: Any = OPTIMIZERS[self.name]
        return chosen.transform(self)


@dataclass(frozen=True)
class LossConfig:
    """What training makes small, per target token."""

    z_loss: float = 1e-4  # times the squared log-partition function, in training only (T5)
    label_smoothing: float = 0.0  # probability taken from the target and spread over all other tokens


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved and what is kept."""

    every: int = 5_000  # time between two checkpoints; the last step is always saved [steps]
    keep: int = 3  # how many of the newest are kept [checkpoints]
    best: Literal["lowest", "highest"] = "lowest"  # of each score, the one whose checkpoint is kept besides
    hours: float = 1.0  # one checkpoint is kept besides in so long a time; 0: none [hours]

    def __post_init__(self):
        at_least(self, "checkpoints.", every=1, keep=1, hours=0)


@dataclass(frozen=True)
class GuardConfig:
    """What is done about bad numbers and bad disks.

    Of an update that is left out parameters and the optimiser's memory stay as they are, bit for bit. Numbers
    are read with each line of the log and before each checkpoint: until then a run that is to end goes on,
    and nothing is saved.
    """

    # a loss or gradient that is not finite ends the run, or is left out
    non_finite: Literal["stop", "skip"] = "stop"
    # leave out a loss so far above the mean of the last 128 [standard deviations]
    spikes: float | None = None
    in_a_row: int = 10  # as many updates are left out one after another, then the run ends [steps]
    # to save a checkpoint; retry: with the next one, after a warning
    failed_save: Literal["stop", "retry"] = "stop"

    def __post_init__(self):
        if self.spikes is not None and not self.spikes > 0:
            raise SettingError(f"guard.spikes={self.spikes} should be above 0, such as 6.0, or None")
        at_least(self, "guard.", in_a_row=1)

    @property
    def skips(self) -> bool:
        """Whether an update may be skipped."""
        return self.non_finite == "skip" or self.spikes is not None


EVERY_UPDATE = GuardConfig()


@dataclass(frozen=True)
class LoopConfig:
    """How long to train, and how often to look."""

    steps: int = 524_288  # where training ends, counted from the first step of the state [steps]
    log_every: int = 100  # time between two lines of metrics.jsonl [steps]
    evaluate_every: int = 5_000  # time between two evaluations; the end is always evaluated [steps]
    score: str = "loss"  # the number of an evaluation by which checkpoints are ranked
    guard: GuardConfig = EVERY_UPDATE
    patience: float = 0.0  # time without a step or a batch of an evaluation, then it ends; 0: any [seconds]
    prefetch: int = 2  # batches sent to the devices ahead of their step [batches]
