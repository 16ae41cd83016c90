"""Changes of settings as values: ``{"model.mlp.d_ff": times(2)}`` is what a row or a scale changes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor
from operator import attrgetter
from typing import Any, Literal, NoReturn, cast

from experiments.study.experiment import Experiment, Mask, PretrainingPhase
from experiments.study.setting_paths import Changes
from lm.config.base import SettingError, changes, did_you_mean, leaves
from lm.objectives.denoising import OBJECTIVES, Objective

# Path of a setting -> its new value, as the command line gives them. In rows and scales they are ``Changes``,
# whose paths and types a type checker knows.
Overrides = dict[str, Any]


def objective(name: str) -> Changes:
    """Return the change to the published objective of that name, with all of its settings."""
    if name not in OBJECTIVES:
        raise SettingError(f"there is no objective {name!r}{did_you_mean(name, OBJECTIVES)}")
    return {"objective": OBJECTIVES[name]}


def denoiser_mixture(name: str) -> Changes:
    """Return the change to the published mixture of denoisers of that name."""
    return {"objective": Objective(mixture=name)}


@dataclass(frozen=True)
class Times:
    """A change that multiplies what the scale has, so that a row means the same at every scale."""

    factor: float
    multiple: int = 1  # the product of an integer is rounded to a multiple of this
    rounding: Literal["up", "down"] = "up"

    def __call__(self, number: float, _experiment: Experiment) -> float:
        """Return the new value of a setting that is ``number`` at this scale."""
        return self.compute(number)

    def compute(self, number: float) -> float:
        """Return ``number`` times ``factor``.

        The product of an integer is rounded to a multiple of ``multiple``, that of a float is not rounded.
        """
        if not isinstance(number, int):
            return number * self.factor
        rounded = ceil if self.rounding == "up" else floor
        # 1,152 x (2 / 3) is 768, and not the next number because of the last bit of 2 / 3
        return rounded(round(number * self.factor / self.multiple, 9)) * self.multiple

    def __str__(self) -> str:
        text = f"x {self.factor:.4g}"
        if self.multiple > 1:
            return f"{text}, {self.rounding} to a multiple of {self.multiple}"
        return text if self.rounding == "up" else f"{text}, rounded down"


times = Times  # reads as a change beside its setting: {"model.mlp.d_ff": times(2)}


def resized(width: float, layers: float = 1) -> Changes:
    """Return the changes that multiply an encoder's width and heads by ``width``, its layers by ``layers``.

    The width of a head stays, and so does `model.embedding` where it is narrower than the model (ALBERT).
    """
    changes: Changes = {
        "model.d_model": times(width, 8),
        "model.mlp.d_ff": times(width, 8),
        "model.attention.num_heads": times(width),
    }
    return changes | ({"model.num_encoder_layers": times(layers)} if layers != 1 else {})


@dataclass(frozen=True)
class ShareOf:
    """A change that makes a setting a share of another one, such as an embedding 1/6 as wide as the model."""

    path: str  # of the other setting, as the changes before leave it
    factor: float
    multiple: int = 1  # the product is rounded up to a multiple of this

    def __call__(self, _old: int | None, experiment: Experiment) -> int:
        """Return the new value of the setting; SettingError if there is no other setting of this path."""
        _check_is_setting(experiment, self.path)
        return self.compute(attrgetter(self.path)(experiment))

    def compute(self, number: float) -> int:
        """Return ``factor`` times ``number``, the other setting's value, rounded up to a ``multiple``."""
        return ceil(round(number * self.factor / self.multiple, 9)) * self.multiple

    def __str__(self) -> str:
        return f"{self.factor:.4g} x {self.path}"


share_of = ShareOf  # likewise: {"model.embedding.d_embed": share_of("model.d_model", 1 / 6)}


@dataclass(frozen=True)
class AtLeast:
    """A change that raises what the scale has to a least number, and leaves what is above it."""

    least: int

    def __call__(self, number: int, _experiment: Experiment) -> int:
        """Return the new value of a setting that is ``number`` at this scale."""
        return max(number, self.least)

    def __str__(self) -> str:
        return f"at least {self.least:,}"


at_least = AtLeast  # likewise: {"pretraining.steps": at_least(2_400)}


@dataclass(frozen=True)
class FirstPhase:
    """A change of ``pretraining.phases``: the pre-training so far becomes a first phase.

    Whatever the row changes afterwards, steps and optimiser included, applies to the phase that follows.
    SettingError for pre-training that has phases already.
    """

    factor: Times  # by which the row then multiplies pretraining.steps
    objective: Objective | None  # None: that of the changes before this one
    mask: Mask | None
    # whether the optimiser goes on into the phase that follows, or ends with this one
    optimizer: Literal["continue", "restart"]

    def __call__(self, old: tuple[PretrainingPhase, ...], experiment: Experiment) -> tuple:
        """Return the phase, as long as the pre-training of ``experiment``."""
        if old:
            raise SettingError(
                f"pretraining.phases={old} should be () before {self}: write all phases in one list"
            )
        steps = experiment.pretraining.steps
        share = steps / max(self.factor.compute(steps), 1)
        optimizer = experiment.pretraining.optimizer if self.optimizer == "restart" else None
        return (PretrainingPhase(share, self.objective or experiment.objective, self.mask, optimizer),)

    def __str__(self) -> str:
        return f"the steps so far first, then {self.factor} steps in all; {self.optimizer} the optimiser"


def after_pretraining(
    factor: float,
    objective: Objective | None,
    mask: Mask | None,
    optimizer: Literal["continue", "restart"],
) -> Changes:
    """Return the changes that put a new last phase after the pre-training that a row has so far.

    factor: number of all steps, as a multiple of the steps so far, which become the first phase.
    objective, mask: those of the first phase. None means the objective of the changes before these, or the
    mask of the architecture.
    optimizer: "continue" keeps the optimiser's state and schedule in the last phase; "restart" begins anew.

    The model is fine-tuned after the last step only: the first phase may be shared with another row, which
    keeps checkpoints at other steps.
    """
    extension = times(factor)
    return {
        "pretraining.phases": FirstPhase(extension, objective, mask, optimizer),
        "pretraining.steps": extension,
        "tuning.branches": (1.0,),  # fractions of pre-training at which fine-tuning starts
    }


def followed_by(first: Changes, second: Changes) -> Changes:
    """Return the changes of ``first``, then those of ``second``.

    A group of settings that ``second`` sets as a whole, such as ``objective``, replaces what ``first`` sets
    within it. With ``first | second`` the parts of ``first`` would stay. A multiple in ``second`` takes the
    place of one in ``first``: they are not multiplied.
    """

    def is_replaced(path: str) -> bool:
        return any(path == new or path.startswith(f"{new}.") for new in second)

    return without(first, *filter(is_replaced, first)) | second


def without(changes: Changes, *paths: str) -> Changes:
    """Return ``changes`` but for those of ``paths``."""
    return cast(Changes, {path: value for path, value in changes.items() if path not in paths})


def apply(experiment: Experiment, new: Mapping[str, Any]) -> Experiment:
    """Return ``experiment`` with all changes of ``new``, in order.

    A function is called with (old value, experiment), after the changes before it. SettingError names the
    whole path of a setting that does not exist, and the most similar one.
    """
    if not new:
        return experiment  # which was checked when it was made
    for path in new:
        _check_is_setting(experiment, path)
    values: dict[str, Any] = {}
    for path, value in new.items():
        if callable(value):
            experiment, values = changes(experiment, values), {}
            value = value(attrgetter(path)(experiment), experiment)
        values[path] = value
    return changes(experiment, values)


def _check_is_setting(experiment: Experiment, path: str) -> None:
    """Raise SettingError unless ``path`` is a setting, or a group of settings, of an experiment."""
    try:
        attrgetter(path)(experiment)
    except AttributeError as error:
        known = [name for name, _ in leaves(experiment)]
        last = path.rpartition(".")[2]
        namesakes = [name for name in known if name.rpartition(".")[2] == last]
        like = did_you_mean(path, namesakes or known)
        raise SettingError(f"there is no setting {path!r}{like}") from error


class ReadOnly(Mapping[str, Any]):
    """A mapping that cannot be changed: a SettingError says what to do instead. ``|`` returns a dict.

    Unlike types.MappingProxyType it is hashable and has its own error.
    """

    def __init__(self, values: Mapping[str, Any], instead: str):
        self._values, self._instead = dict(values), instead

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values))  # of the names alone: values may be of any type

    def __repr__(self) -> str:
        return repr(self._values)

    def __or__(self, other: Changes | Overrides) -> Changes:
        return cast(Changes, {**self, **other})

    def __ror__(self, other: Changes | Overrides) -> Changes:
        return cast(Changes, {**other, **self})

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise SettingError(f"this cannot be changed: {self._instead}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse
