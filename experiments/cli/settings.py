"""Settings on a command line: as options, from a file, and as a grid of values."""

import dataclasses
import io
import shlex
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from contextvars import ContextVar
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from experiments.study.changes import Overrides, apply
from experiments.study.experiment import Experiment, PretrainingPhase
from experiments.study.overrides import (
    START_OPTIONS,
    check_agreement_with_checkpoint,
    check_overrides_are_read,
    command_line_overrides,
)
from experiments.study.registry import BASELINE_ROW, REGISTRY, TABLES, build, find
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.table import Row
from experiments.study.words import setting_arguments, shown_value
from lm.config.base import (
    DataError,
    SettingError,
    changes,
    did_you_mean,
    leaves,
    parse_json,
    setting_descriptions,
    unused_settings,
)
from lm.files import CHECKSUM

CHANGED_OFTEN = (  # the settings that people change first, which --help lists
    "data.corpus",
    "data.vocabulary",
    "data.vocabulary_size",
    "data.inputs_length",
    "objective.noise",
    "objective.rate",
    "objective.mean_span_length",
    "model.architecture",
    "model.num_encoder_layers",
    "model.num_decoder_layers",
    "model.d_model",
    "model.mlp.d_ff",
    "model.mlp.activation",
    "model.attention.num_heads",
    "model.positions.kind",
    "model.dropout",
    "pretraining.steps",
    "pretraining.batch_size",
    "pretraining.optimizer.name",
    "pretraining.optimizer.learning_rate",
    "finetuning.steps",
    "finetuning.batch_size",
    "finetuning.optimizer.learning_rate",
    "tuning.mixtures",
    "tuning.heads",
    "tuning.pool",
    "tuning.dense",
    "tuning.inputs_length",
    "seed",
)

# {path: value} whose settings and defaults the help lists; None where a command line is parsed, not explained
HELP_DEFAULTS: ContextVar[Mapping[str, Any] | None] = ContextVar("HELP_DEFAULTS", default=None)
# paths of the settings that are options; None for all, which take tyro a third of a second
OPTION_PATHS: ContextVar[Collection[str] | None] = ContextVar("OPTION_PATHS", default=None)
TEACHER = "distillation.teacher"  # the setting that names a model, as --start does
TABLES_VALUE = "the table's"  # shown for a setting whose default is another one in each table, or row
TYPES = ConstructorRegistry()


def types_of(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each (dotted path, type) of the settings of a dataclass."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from types_of(kind, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, kind


def options_type(paths: Iterable[str] | None = None) -> Any:
    """Return a TypedDict with an optional key for each setting that is an option.

    tyro's result holds those that were given. The options are ``paths`` if given, else the settings that a
    help page lists (HELP_DEFAULTS), else OPTION_PATHS, else all settings.
    """
    types, descriptions = dict(types_of(Experiment)), setting_descriptions(Experiment)
    defaults = HELP_DEFAULTS.get()
    if paths is None:
        paths = defaults
    if paths is None:
        paths = OPTION_PATHS.get()
    if paths is None:
        paths = types
    keys = {}
    for path in paths:
        text, hint = descriptions.get(path, ""), ""
        if defaults is not None:
            hint = f"(default: {shown_value(defaults[path])})"
        keys[path] = Annotated[
            types[path], tyro.conf.arg(help=text[:1].upper() + text[1:], help_behavior_hint=hint)
        ]
    make: Any = TypedDict
    return make("Settings", keys, total=False)


def settings_among(words: Iterable[str]) -> list[str]:
    """Return the paths of the settings that are options among the words of a command line."""
    options = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    found = []
    for path, _ in types_of(Experiment):
        group, dot, name = path.rpartition(".")
        if path in options or f"{group}{dot}no_{name}" in options:  # as a switch is turned off
            found.append(path)
    return found


def help_defaults(words: Sequence[str], everything: bool, of_tables: bool = False) -> dict[str, Any]:
    """Return the settings that a help page lists, with the values of the row and scale among ``words``.

    of_tables: whether the command trains tables, each at its own scale. A value is then that of all rows of
    the tables among ``words``; where they differ, or no table is named, it is "the table's".
    """
    scale = next((name for name in SCALES if name in words or f"--scale={name}" in words), None)
    if not of_tables:
        row = next((word for word in words if word in REGISTRY), BASELINE_ROW)
        values = dict(leaves(build(row, scale or DEFAULT_SCALE)))
    else:
        values = table_defaults(words, scale)
        del values["seed"]  # such a command takes --seeds N
    if everything:
        return values
    return {path: values[path] for path in CHANGED_OFTEN if path in values}


def table_defaults(words: Sequence[str], scale: str | None) -> dict[str, Any]:
    """Return each setting's value in all rows that one of ``words`` matches; TABLES_VALUE if they differ."""
    rows: list[Row] = []
    for word in words:
        with suppress(SettingError):  # an option or its value
            rows += [row for row in find(word) if not row.needs]  # which cannot be built
    if not rows:
        return {path: TABLES_VALUE for path, _ in leaves(_any_experiment())}
    first, *others = [dict(leaves(build(row.name, scale or TABLES[row.table].scale))) for row in rows]
    values: dict[str, Any] = dict(first)
    for other in others:
        for path, value in other.items():
            if value != first[path]:
                values[path] = TABLES_VALUE
    return values


@TYPES.primitive_rule
def _integer_rule(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if about.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


@TYPES.primitive_rule
def _words_rule(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Read words or paths as tyro does, but show in help that there are none by default: it shows a blank."""
    kinds: dict[Any, type] = {tuple[str, ...]: str, tuple[Path, ...]: Path}
    if about.type not in kinds:
        return None
    kind = kinds[about.type]
    metavar = kind.__name__.upper()
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar} [{metavar} ...]]",
        instance_from_str=lambda words: tuple(map(kind, words)),
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(word, kind) for word in value),
        str_from_instance=lambda value: [*map(str, value)] or ["none"],
    )


@TYPES.primitive_rule
def _phase_rule(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if about.type is not PretrainingPhase:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PHASE",
        instance_from_str=lambda words: PretrainingPhase.parse(words[0]),
        is_instance=lambda value: isinstance(value, PretrainingPhase),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """Return ``"20000"``, ``"20_000"`` and ``"2e4"`` alike as 20000."""
    for kind in (int, float):
        try:
            number = kind(text)
            if number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    raise ValueError(f"{text!r} should be a whole number, such as 20000 or 2e4")


def _scale_type() -> Any:
    return Literal[tuple(SCALES)]


# Options that several commands have, with their help.
Scale = Annotated[
    str,
    tyro.conf.arg(
        help="Size of the study.",
        constructor_factory=_scale_type,
        help_behavior_hint=lambda default: f"(default: {default.strip('[]' + chr(39))})",
    ),
]
Settings = Annotated[Overrides, tyro.conf.arg(name="", constructor_factory=options_type)]
ConfigFile = Annotated[
    Path | None,
    tyro.conf.DisallowNone,
    tyro.conf.arg(
        metavar="FILE",
        help="File of settings to apply, TOML or JSON, such as the settings.json of a run.",
        help_behavior_hint="",
    ),
]
Start = Annotated[
    str,
    tyro.conf.arg(
        metavar="MODEL",
        help="Start from this model: a folder in the format of transformers, a run, RUN:STAGE, or hf:NAME.",
        help_behavior_hint="",
    ),
]
Runs = Annotated[Path, tyro.conf.arg(metavar="FOLDER", help="Folder of the runs and their data.")]
Mixture = Annotated[
    str,
    tyro.conf.arg(
        help="Use the model that was fine-tuned on this mixture or task; by default the first fine-tuned one "
        "that the command can use, else the pre-trained one.",
        help_behavior_hint="",
    ),
]
DryRun = Annotated[
    bool,
    tyro.conf.arg(
        help="Only print what would be trained, its FLOP and the expected time here, and which data are "
        "missing; prepare and write nothing."
    ),
]
Allow = Annotated[
    str,
    tyro.conf.arg(
        help="Resume although these changed since the run began, such as data,code: any of settings, "
        "vocabulary, data, code, packages.",
        help_behavior_hint="",
    ),
]
Restart = Annotated[
    int,
    tyro.conf.arg(
        help="Restart up to this many times after a crash, a kill such as for lack of memory, or exit code "
        "42 or 43; not after bad settings, a loss of NaN, or a signal to stop (Ctrl-C, SIGTERM)."
    ),
]


def given_changes(
    rows: Sequence[str], scale: str, settings: Overrides, config: Path | None, start: str, runs: Path
) -> Overrides:
    """Return what a command line changes in rows: by --start, by --config, and by options, which win.

    An option may name a teacher by any folder, run or hf:NAME, as --start does: the change is the name of its
    copy below ``runs``. A file of settings names that copy.

    SettingError for a setting that none of the rows reads, or that contradicts the checkpoint to start from.
    """
    start_overrides: Overrides = {}
    settings = _with_imported_teacher(settings, runs)
    if start:
        from experiments.runs.init_from import overrides_of_start  # slow to import: it reads tokenizers

        start_overrides = overrides_of_start(start, runs, settings)
    experiments = [build(row, scale, start_overrides) for row in rows]
    given_overrides = settings
    if config is not None:
        if not rows:
            raise SettingError(f"--config {config} is read by no row, since none of these can be built")
        given_overrides = read_config(config, experiments, settings) | settings
    for experiment in experiments:
        check_agreement_with_checkpoint(experiment, given_overrides)
    all_overrides = start_overrides | given_overrides
    check_overrides_are_read([build(row, scale, all_overrides) for row in rows], given_overrides)
    return all_overrides


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """One combination of the values of a grid, and with them all changes of rows."""

    values: Overrides  # of the settings that the grid varies
    changes: Overrides  # of the command line, with these values


def given_points(
    rows: Sequence[str],
    scale: str,
    grid: Sequence[str],
    command_line_changes: Overrides,
    settings: Mapping[str, Any],
    start: str,
    runs: Path,
) -> list[GridPoint]:
    """Return the points of a grid, each with all that a command line changes in rows at this point.

    Without a grid there is one point, which has no values of its own. A value of the grid means what it would
    mean as an option. If it names a teacher, the teacher is imported. With ``start``, a value of a setting in
    START_OPTIONS, such as the architecture, converts the checkpoint, so the changes that follow from
    ``start`` are computed again for this point. ``command_line_changes`` are those that ``given_changes``
    returned for ``settings``, the settings that were given as options.

    SettingError for a setting that none of the rows reads, or that contradicts the checkpoint to start from.
    """
    points = []
    for values in grid_points(grid):
        values = _with_imported_teacher(values, runs)
        at_point = command_line_changes
        if start and not values.keys().isdisjoint(START_OPTIONS):
            from experiments.runs.init_from import overrides_of_start  # slow to import: it reads tokenizers

            start_overrides = overrides_of_start(start, runs, {**settings, **values})
            at_point = start_overrides | command_line_overrides(command_line_changes)
        if start:
            for row in rows:
                check_agreement_with_checkpoint(build(row, scale, at_point), values)
        at_point = at_point | values
        check_overrides_are_read([build(row, scale, at_point) for row in rows], values)
        points.append(GridPoint(values, at_point))
    return points


def _with_imported_teacher(settings: Overrides, runs: Path) -> Overrides:
    """Return the settings with the name of the teacher's copy below ``runs``, imported if it is not there."""
    if not (teacher := settings.get(TEACHER)):
        return settings
    from experiments.runs.init_from import teacher_name  # slow to import: it reads tokenizers

    return settings | {TEACHER: teacher_name(teacher, runs)}


def read_config(path: Path, rows: Sequence[Experiment], options: Overrides) -> Overrides:
    """Return the settings in a file that differ from those of at least one of ``rows``.

    The file is TOML or JSON, nested or with dotted names. It is checked together with ``options``, which
    replace its settings. The settings.json of a run holds every setting, so from such a file the settings are
    left out that no row reads once the file and ``options`` are applied. From any other file they are kept,
    so that the caller reports them.
    """
    if not path.exists():
        beside = [each.name for each in path.absolute().parent.glob("*") if each.suffix in (".toml", ".json")]
        raise SettingError(f"--config {path} is not there{did_you_mean(path.name, beside)}")
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix.lower() == ".toml":
            nested = tomllib.loads(text)
        else:
            nested = parse_json(text, path)
    except (OSError, ValueError) as error:
        raise SettingError(f"--config {path} should be a file of settings, TOML or JSON: {error}") from error
    if not isinstance(nested, dict):
        raise SettingError(f"--config {path} should hold settings by name, not a {type(nested).__name__}")
    is_settings_json_of_run = nested.pop(CHECKSUM, None) is not None
    found = dict(_flat(nested, ""))
    try:
        new = [changes(experiment, found | options) for experiment in rows]
    except DataError:
        raise
    except SettingError as error:
        raise SettingError(f"--config {path}: {error}") from error
    differing: Overrides = {}
    for old, experiment in zip(rows, new, strict=True):
        before, after = dict(leaves(old)), dict(leaves(experiment))
        differing |= {name: after[name] for name in found if name in after and after[name] != before[name]}
    if not is_settings_json_of_run:
        return differing
    changed = [changes(experiment, differing | options) for experiment in rows]
    used: Overrides = {}
    for name, value in differing.items():
        if not all(unused_settings(experiment, [name]) for experiment in changed):
            used[name] = value
    return used


def _flat(nested: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def parse_settings(words: Sequence[str], paths: Iterable[str] | None = None) -> Overrides:
    """Return {path: value} of settings as a command line's ``words`` give them."""
    found: Overrides = tyro.cli(options_type(paths), prog="lm sweep", args=words, registry=TYPES)
    return found


def first_folder(runs: Sequence[str]) -> Path:
    """Return the first of several folders of runs, where reports go; SettingError if there is none."""
    if not runs:
        raise SettingError("--runs: name one or more folders of runs")
    return Path(runs[0])


def grid_points(grid: Sequence[str]) -> list[Overrides]:
    """Return the combinations of the values in ``PATH=VALUE,VALUE,...``, in order; [{}] without a grid.

    The blanks in a value separate the elements of a setting that takes several; a value in quotes may have
    commas.
    """
    axes, paths, kinds = list[list[Overrides]](), list[str](), dict(types_of(Experiment))
    for text in grid:
        path, equals, values = text.partition("=")
        path = path.removeprefix("--").replace("-", "_")
        if not equals or not values.strip(", "):
            raise SettingError(
                f"--grid {text!r} should be SETTING=VALUE,VALUE, such as model.mlp.d_ff=128,256"
            )
        if members := [known for known in kinds if known.startswith(f"{path}.")]:
            raise SettingError(
                f"--grid {path} is a group of settings: name one of them, such as {', '.join(members[:3])}"
            )
        if path not in kinds:
            apply(_any_experiment(), {path: None})  # raises SettingError with the nearest name
        if path in paths:
            raise SettingError(f"--grid {path} is there twice: give all values in one {path}=VALUE,VALUE")
        paths.append(path)
        axes.append([_grid_value(path, kinds[path], value) for value in _split(path, values)])
    combinations: list[Overrides] = []
    for values_of_axes in product(*axes):
        combination: Overrides = {}
        for value in values_of_axes:
            combination |= value
        combinations.append(combination)
    return combinations


def _any_experiment() -> Experiment:
    return build(next(iter(REGISTRY)), DEFAULT_SCALE)


def _split(path: str, values: str) -> list[str]:
    """Return the values that commas separate outside of quotes.

    SettingError for an open quote, or for nothing but blanks before or after a comma.
    """
    lexer = shlex.shlex(values, posix=True, punctuation_chars=",")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = "", True, ""
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise SettingError(
            f"--grid {path}: {values!r} cannot be split ({error}); close the quote, or write \\ before it"
        ) from error
    found, commas = tokens[::2], tokens[1::2]  # commas that follow each other are one token
    if len(found) != len(commas) + 1 or set(commas) - {","} or any(map(str.isspace, found)):
        raise SettingError(
            f"--grid {path}: {values!r} lacks a value beside a comma; delete the comma, or write '' for an "
            "empty text"
        )
    return [value.strip() for value in found]


def _grid_value(path: str, kind: Any, text: str) -> Overrides:
    """Return the setting as tyro reads ``text`` behind its option; a switch takes True or False."""
    words = [f"--{path}", *(text.split() if get_origin(kind) is tuple else [text])]
    if kind is bool and text in ("True", "False"):
        words = setting_arguments({path: text == "True"})
    try:
        with redirect_stderr(io.StringIO()) as error:
            return parse_settings(words, [path])
    except SystemExit as end:
        raise SettingError(
            f"--grid {path}: {text!r} is not a value of this setting\n{error.getvalue()}"
        ) from end
