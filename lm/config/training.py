"""The settings of training; only the standard library, so that listing experiments needs no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lm.config.base import INT32, Condition, SettingError, above_0, at_least, at_most, below_1, setting

if TYPE_CHECKING:
    import jax
    import optax

# names of a parameter's axes, by its own; "layers" first if it is stacked
Axes = Mapping[str, tuple[str, ...]]


class TruncatedBPTT(NamedTuple):
    """Rows that several steps read in chunks, with a recurrent state carried from step to step."""

    rows: int  # of a batch
    chunks_per_row: int  # steps after which rows, and the state, start anew


# ``read_if`` of settings: which schedules and optimisers read them
DECAYS_EVERY: Condition = {"schedule": ("decay-every",)}
OF_ADAFACTOR: Condition = {"name": ("adafactor",)}
OF_ADAMW: Condition = {"name": ("adamw", "adamw-relative", "muon")}
OF_MUON: Condition = {"name": ("muon",)}


@dataclass(frozen=True)
class Schedule:
    """Which optimiser, and what all optimisers share: the course of the learning rate, decay and clipping."""

    name: Literal["adafactor", "adamw", "adamw-relative", "muon"] = "adafactor"  # which optimiser
    # multiplies the schedule; a step changes a parameter by about so much ("adamw", "muon": root mean square)
    # or by that share of its own size ("adafactor", "adamw-relative")
    learning_rate: float = 1.0
    # course of the learning rate after the ramp; warmup-stable-decay: constant, then linear to 0
    schedule: Literal[
        "constant", "inverse-sqrt", "linear", "cosine", "decay-every", "warmup-stable-decay"
    ] = "inverse-sqrt"
    warmup_steps: int = 0  # ramp from 0 that multiplies the schedule; T5 has none [steps]
    # where "inverse-sqrt", 1 over the root of the step, begins to fall [steps]
    timescale: int = setting(10_000, {"schedule": ("inverse-sqrt",)})
    # where "warmup-stable-decay" begins to fall [steps]
    decay_start: int = setting(0, {"schedule": ("warmup-stable-decay",)})
    # where that, "linear" (T5X: linear_decay) and "cosine", both begun at the ramp's end, reach 0 [steps]
    decay_end: int = setting(0, {"schedule": ("linear", "cosine", "warmup-stable-decay")})
    # what "decay-every" (T5X: decay_every) multiplies the rate by, again and again
    decay_factor: float = setting(0.5, DECAYS_EVERY)
    # from the first step on, in what time "decay-every" does so once [steps]
    steps_per_decay: int = setting(20_000, DECAYS_EVERY)
    weight_decay: float = 0.0  # share of each matrix taken off in a step, times the learning rate
    clip_norm: float | None = None  # longest gradient, over all parameters together; None: any
    # how much a step keeps of the mean of the parameters by which the model is evaluated, fine-tuned and
    # exported, while training goes on from the parameters themselves; 0: no mean
    ema: float = 0.0


@dataclass(frozen=True)
class Adafactor:
    """Adafactor as T5 uses it (Shazeer and Stern 2018)."""

    # Adafactor: largest root mean square of one parameter's update; None: any
    clip_rms: float | None = setting(1.0, OF_ADAFACTOR)
    # Adafactor: the mean of squares forgets with 1 - step ** -decay_exponent
    decay_exponent: float = setting(0.8, OF_ADAFACTOR)
    # Adafactor: matrices at least so wide keep row and column means only [features]
    factor_from: int = setting(128, OF_ADAFACTOR)
    epsilon_square: float = setting(1e-30, OF_ADAFACTOR)  # Adafactor: added to squared gradients
    # Adafactor and adamw-relative: smallest size a parameter counts with
    epsilon_scale: float = setting(
        1e-3, (OF_ADAFACTOR | {"relative": ("parameter",)}, {"name": ("adamw-relative",)})
    )
    # Adafactor: how much of the mean update a step keeps (T5X: beta1); 0: nothing is remembered
    momentum: float = setting(0.0, OF_ADAFACTOR)
    # Adafactor: what the learning rate is relative to
    relative: Literal["parameter", "none"] = setting("parameter", OF_ADAFACTOR)

    def transform(self, _axes: Axes) -> "optax.GradientTransformation":
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

    beta1: float = setting(0.9, OF_ADAMW)  # AdamW: how much of the mean gradient a step keeps
    beta2: float = setting(0.95, OF_ADAMW)  # AdamW: how much of the mean squared gradient a step keeps
    epsilon: float = setting(1e-8, OF_ADAMW)  # AdamW: added to the root of the mean squared gradient

    def transform(self, _axes: Axes) -> "optax.GradientTransformation":
        """Directions from gradients."""
        import optax

        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True)
class RelativeAdamW(AdamW, Adafactor):
    """AdamW with updates relative to a parameter's size, as Adafactor's are (nanoT5, Nawrot 2023)."""

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Directions from gradients."""
        import optax

        return optax.chain(AdamW.transform(self, axes), optax.scale_by_param_block_rms(self.epsilon_scale))


@dataclass(frozen=True)
class Muon(AdamW):
    """The matrices of all layers change by the orthogonal matrix nearest to a mean gradient (Jordan 2024).

    Embeddings, output matrices, heads, norms, biases and relative-position tables change by AdamW.
    """

    # Muon: how much of the mean gradient of a matrix a step keeps
    muon_momentum: float = setting(0.95, OF_MUON)
    # Muon: root mean square of a matrix's update; AdamW's is about so large, so that one learning rate
    # serves both (Liu et al. 2025)
    muon_rms: float = setting(0.2, OF_MUON)

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """Directions from gradients; of a matrix [...,rows,columns] for each of the axes in front."""
        import optax

        # Orthogonal matrices know no length: that of optax's momentum, a sum and no mean, does not matter.
        momentum = optax.trace(self.muon_momentum, nesterov=True)
        matrices = optax.chain(momentum, optax.stateless(self._orthogonal))
        kinds = {name: "matrix" if _is_matrix(names) else "other" for name, names in axes.items()}
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
        # The root mean square of an orthogonal matrix is the root of one over its longer side.
        return jax.tree.map(lambda x: self.muon_rms * max(x.shape[-2:]) ** 0.5 * x, directions)


def _is_matrix(names: tuple[str, ...]) -> bool:
    """Whether a parameter with these axes is a matrix of a layer, by which features are multiplied."""
    return names[0] == "layers" and len(names) > 2 and "buckets" not in names


OPTIMIZERS = {  # by ``Schedule.name``
    "adafactor": Adafactor,
    "adamw": AdamW,
    "adamw-relative": RelativeAdamW,
    "muon": Muon,
}


# Inherits the settings of all optimisers, so that each has a flat name, such as ``optimizer.beta1``. A new
# optimiser is a dataclass with ``transform``: first base class here, in OPTIMIZERS and in ``Schedule.name``.
@dataclass(frozen=True)
class OptimizerConfig(Muon, RelativeAdamW, Schedule):
    """How parameters change: by Adafactor as in T5, by AdamW, or by Muon."""

    def __post_init__(self):
        falls = "decay_start" if self.schedule == "warmup-stable-decay" else "warmup_steps"
        decays = self.schedule in ("linear", "cosine", "warmup-stable-decay")
        if decays and self.decay_end <= getattr(self, falls):
            raise SettingError(
                f"optimizer.decay_end={self.decay_end} should be beyond optimizer.{falls}="
                f"{getattr(self, falls)} for the schedule {self.schedule!r}"
            )
        positive = (
            "learning_rate timescale decay_exponent factor_from decay_factor muon_rms clip_norm clip_rms"
        )
        above_0(self, "optimizer.", f"{positive} epsilon epsilon_square epsilon_scale")
        at_least(self, "optimizer.", warmup_steps=0, decay_start=0, weight_decay=0, steps_per_decay=1)
        most = dict.fromkeys(
            ("warmup_steps", "decay_start", "decay_end", "timescale", "steps_per_decay"), INT32
        )
        at_most(self, "optimizer.", factor_from=INT32, **most)
        below_1(self, "optimizer.", "beta1 beta2 momentum muon_momentum ema")

    def transform(self, axes: Axes) -> "optax.GradientTransformation":
        """The directions of the optimiser that ``name`` names, of parameters with these axes."""
        chosen: Any = OPTIMIZERS[self.name]
        return chosen.transform(self, axes)


@dataclass(frozen=True)
class LossConfig:
    """What training makes small, per target token."""

    z_loss: float = 1e-4  # times the squared log-partition function, in training only (T5)
    label_smoothing: float = 0.0  # probability taken from the target and spread over all other tokens


# of a checkpoint: the parameters, their average (optimizer.ema), or the average where one is kept, as scored
Weights = Literal["scored", "average", "last"]


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved and what is kept."""

    every: int = 5_000  # time between two checkpoints; the last step is always saved [steps]
    keep: int = 3  # how many of the newest are kept [checkpoints]
    best: Literal["lowest", "highest"] = "lowest"  # of each score, the one whose checkpoint is kept besides
    hours: float = 1.0  # one checkpoint is kept besides in so long a time; 0: none [hours]
    steps: tuple[int, ...] = ()  # that are saved and evaluated besides, and kept [steps]

    def __post_init__(self):
        at_least(self, "checkpoints.", every=1, keep=1, hours=0)

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` is saved."""
        return step % self.every == 0 or step in self.steps


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
    spikes: float | None = setting(None, {"counts.model": ("none",)})
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
    # time between two evaluations, at checkpoints or between them; the end is always evaluated [steps]
    evaluate_every: int = 5_000
    score: str = "loss"  # the number of an evaluation by which checkpoints are ranked
    guard: GuardConfig = EVERY_UPDATE
    patience: float = 0.0  # time without a step or a batch of an evaluation, then it ends; 0: any [seconds]
    profile: tuple[int, int] | None = None  # first and last step of which a trace is written; None: none
    prefetch: int = 2  # batches sent to the devices ahead of their step [batches]
