"""``lm show``: the settings of a row or run, what a row changes, examples, stages or the costs of a model."""

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.markup import escape

from experiments.cli.run_names import shortest_name
from experiments.cli.settings import ConfigFile, Runs, Scale, Settings, Start, given_changes
from experiments.console import CONSOLE, MISSING, NARROW, RUNS, binary_size, listing, print_line, show_listing
from experiments.runs.paths import SETTINGS, find_cache, load_settings
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import command_line_overrides, overrides_of
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, TABLES, baseline_of, build, find_one
from experiments.study.scales import DEFAULT_SCALE
from experiments.study.settings_diff import relevant_diff
from experiments.study.words import setting_arguments
from lm.config.base import SettingError, changes, leaves, setting_descriptions, unused_settings
from lm.config.model import ModelConfig
from lm.files import relative
from lm.nn.presets import PRESETS, row_lengths

MISSPELT = 0.8  # ratio of alike characters (difflib) from which a name is taken for another with a slip
Dtype = Literal["bfloat16", "float32"]


def show(
    row: str,
    /,
    settings: Settings,
    scale: Scale = DEFAULT_SCALE,
    config: ConfigFile = None,
    start: Start = "",
    runs: Runs = RUNS,
    diff: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[ROW]")] = None,
    to: str = "",
    examples: int = 0,
    stages: bool = False,
    costs: bool = False,
    length: int | None = None,
    batch: int = 1,
    dtype: Dtype | None = None,
    tokens: float = 0,
) -> None:
    """Show every setting of a row, run or published model; or what it changes, its examples, stages or costs.

    Settings given as options change the row, as for lm run.

        lm show t5/6-corruption-rate/50
        lm show t5/6-corruption-rate/50 --diff
        lm show t5/1-baseline/baseline --diff --to mini
        lm show t5/5-bert-style/replace-spans --examples 3
        lm show llama-7b --costs
        lm show @mine

    Args:
        row: Row of a table, such as t5/6-corruption-rate/15, published model, such as llama-7b, or folder or
            @NAME of a run.
        diff: Show only the settings in which the row differs from another one, by default from its baseline,
            or in which a run differs from another run (lm show @ONE --diff @OTHER).
        to: Compare with this scale: without --diff ROW, the row with itself.
        examples: Print this many decoded examples of pre-training and of each task, as the model sees them.
        stages: Show the stages of training: what each starts from, its steps and its folder.
        costs: Show the model's parameters, its FLOP per token beside 6 N D, and the bytes of its cache.
        length: Row length for --costs, on each side of an encoder-decoder; by default the row's own lengths,
            or those that the published model was pre-trained on [tokens].
        batch: Rows that are decoded at once, for --costs [rows].
        dtype: Type of the cache, for --costs; by default that in which the row computes, or bfloat16 for a
            published model.
        tokens: Training tokens D, for --costs, such as 3e11; by default those of the row's pre-training; of a
            published model unknown [tokens].
    """
    comparison = "--to" if to and diff is None else "--diff"  # as it was typed
    views = {comparison: diff is not None or bool(to), "--examples": examples > 0}
    views |= {"--stages": stages, "--costs": costs}
    chosen = [name for name, is_chosen in views.items() if is_chosen]
    if len(chosen) > 1:
        raise SettingError(f"{' and '.join(chosen)} show different things of {row}: choose one")
    if not costs and (length is not None or batch != 1 or dtype is not None or tokens):
        raise SettingError("--length, --batch, --dtype and --tokens are options of --costs: add it too")
    if examples < 0:
        raise SettingError(f"--examples {examples} should be at least 1")
    check_published_spelling(row)
    if row in PRESETS:
        if scale != DEFAULT_SCALE or config or start:
            raise SettingError(
                f"{row} is a published model, which has a size of its own: give --scale, --config and "
                "--start to a row of the study"
            )
        show_published(row, settings, chosen, length, batch, dtype, tokens)
        return
    if (Path(row) / SETTINGS).exists():
        if settings or config or start or scale != DEFAULT_SCALE or to:
            raise SettingError(
                f"{row} is a run, which is shown with its own settings: give --scale, --to and settings to a "
                "row"
            )
        if diff is not None:
            show_diff_of_runs(Path(row), [*map(Path, diff)])
            return
        experiment, title = load_settings(Path(row)), f"the run {row}"
        folder, cache = Path(row), find_cache(Path(row))
    else:
        given = given_changes([row], scale, settings, config, start, runs)
        if comparison in chosen:
            show_diff(row, scale, given, diff or (), to)
            return
        experiment = build(row, scale, given)
        title = f"{row} at scale {scale}"
        if named := setting_arguments(command_line_overrides(given, settings)):
            title += f" with {shlex.join(named)}"
        folder = run_folder(runs, scale, row, experiment.seed, overrides_of(row, scale, experiment))
        cache = runs / "cache"
    if "--examples" in chosen:
        from experiments.evaluate.examples import show_examples  # reads data, with jax

        show_examples(experiment, examples, cache)
    elif costs:
        from lm.nn.electra import generator_of  # with jax

        read = tokens_read(row, experiment)
        if length is not None:
            read = TokensRead(length, length, 0)  # with other rows, another number in all
        tokens = tokens or read.in_pretraining
        generator = generator_of(experiment.model, experiment.generator_share)
        show_costs(experiment.model, title, read.inputs, read.targets, batch, dtype, tokens, generator)
    elif stages:
        show_stages(experiment, folder, cache, title)
    else:
        show_settings(experiment, title)
        if not unused_settings(experiment, ["generator_share"]):
            from lm.nn.electra import generator_of  # with jax

            if generator := generator_of(experiment.model, experiment.generator_share):
                print_line(f"ELECTRA's generator: {generator_sizes(generator, experiment.model)}")


def generator_sizes(generator: ModelConfig, model: ModelConfig) -> str:
    """Return the sizes of ELECTRA's generator, whose width ``generator_share`` alone does not tell."""
    heads = f"{generator.attention.num_heads} of {model.attention.num_heads}"
    return (
        f"d_model={generator.d_model} ({generator.d_model / model.d_model:.3g} of the model's), "
        f"attention.num_heads={heads}, mlp.d_ff={generator.mlp.d_ff} of {model.mlp.d_ff}"
    )


def check_published_spelling(name: str) -> None:
    """Raise SettingError for what is nearly the name of a published model, and no row."""
    close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=MISSPELT)
    if close and name not in {*PRESETS, *REGISTRY, *TABLES} and not Path(name).exists():
        raise SettingError(f"no row or published model is called {name!r}; did you mean {close[0]!r}?")


def show_published(
    name: str,
    settings: Overrides,
    chosen: Sequence[str],
    length: int | None,
    batch: int,
    dtype: Dtype | None,
    tokens: float,
) -> None:
    """Show the settings or costs of a published model, of which only those of ``model`` can be changed."""
    strange = [path for path in settings if not path.startswith("model.")]
    if strange:
        raise SettingError(f"{name} is a published model, which has no setting {' and no '.join(strange)}")
    if chosen not in ([], ["--costs"]):
        raise SettingError(f"{name} is a published model: {chosen[0]} is for rows of the study")
    given = {path.removeprefix("model."): value for path, value in settings.items()}
    model = changes(PRESETS[name], given)
    title = f"{name}, as published" + f" with {shlex.join(setting_arguments(settings))}" * bool(settings)
    if not chosen:
        show_settings(model, title)
        return
    if length is not None:
        inputs = targets = length
    elif lengths := row_lengths(name, model):
        inputs, targets = lengths
    else:
        raise SettingError(
            f"--length should be given: {name} was trained on sentences, whose lengths vary; for example "
            "--length 64"
        )
    model = changes(PRESETS[name], {"dtype": "bfloat16"} | given)
    show_costs(model, title, inputs, targets, batch, dtype, tokens)


def show_settings(settings: Any, title: str) -> None:
    """Print a line per setting: its value and its meaning, which is below the value in a narrow terminal."""
    meaning, headings = setting_descriptions(type(settings)), ("value", "meaning [unit]")
    narrow = CONSOLE.width < NARROW
    grid = listing("setting", *[", ".join(headings)] if narrow else headings, title=title)
    for path, value in leaves(settings):
        texts = escape(str(value)), escape(meaning.get(path, ""))
        grid.add_row(path, *["\n".join(filter(None, texts))] if narrow else texts)
    CONSOLE.print(grid)


def show_diff(row: str, scale: str, given: Overrides, others: Sequence[str], to: str) -> None:
    """Print what differs between another row, or another scale, and ``row`` with the settings ``given``."""
    if len(others) > 1:
        raise SettingError(f"--diff {' '.join(others)}: a row is compared with one other row")
    if to:  # from this row at its scale to the other, or to itself, at another
        old = build(row, scale, given)
        new = build(others[0], to) if others else build(row, to, given)
        sides = f"{row} at scale {scale}", f"{others[0] if others else row} at scale {to}"
    else:
        other = others[0] if others else baseline_of(row)
        old, new = build(other, scale), build(row, scale, given)
        sides = other, f"{row} with the settings given" if given else row
    changed = relevant_diff(old, new)
    if not (to or others or given) and other == row:
        print_line(f"{row} is the baseline of its table; --diff ROW compares it with another.")
    else:
        _print_sides(*sides, bool(changed))
    for path, (before, after) in changed.items():
        is_rows_own = not to and not others and path not in given
        derivation = find_one(row).derivation(path) if is_rows_own else ""
        print_line(f"{path}: {before} → {after}{f' ({derivation})' * bool(derivation)}")


def show_diff_of_runs(run: Path, others: Sequence[Path]) -> None:
    """Print the settings in which ``run`` differs from the one other run that ``others`` name."""
    if len(others) != 1 or not (others[0] / SETTINGS).exists():
        given = " ".join(["--diff", *map(str, others)])
        raise SettingError(f"{run} is a run, and {given} should name one other run, such as --diff @OTHER")
    changed = relevant_diff(load_settings(others[0]), load_settings(run))
    _print_sides(shortest_name(others[0]), shortest_name(run), bool(changed))
    for path, (before, after) in changed.items():
        print_line(f"{path}: {before} → {after}")


def _print_sides(old: str, new: str, is_changed: bool) -> None:
    """Print the names of what is compared, in the order of the values on the lines below."""
    print_line(f"{old} → {new}" if is_changed else f"{old} and {new} are the same experiment.")


@dataclass(frozen=True)
class TokensRead:
    """Holds how long the sequences of a row are, and how many tokens its model is pre-trained on."""

    inputs: int  # length of the inputs of a sequence; 0 for a decoder, whose sequences have none
    targets: int  # length of its targets; 0 for an encoder
    in_pretraining: int  # D: tokens that one model is pre-trained on, in all phases, padding included


def tokens_read(name: str, experiment: Experiment) -> TokensRead:
    """Return the lengths of a row's sequences, and the tokens D of its pre-training.

    The lengths are those of the last phase of pre-training; without pre-training, those of the first stage of
    the network. D leaves out the start pre-training (``start.steps``), and is 0 without pre-training. Of the
    members of an ensemble, and of several pre-trainings for one downstream task each, the first is counted.
    SettingError for a row without a network.
    """
    from experiments.runs.kinds.network import NetworkStage  # with jax
    from experiments.runs.kinds.stage import Stage
    from experiments.runs.stages import stages
    from lm.data.packing import row_length

    def sequence_lengths(stage: NetworkStage, model: ModelConfig) -> tuple[int, int]:
        inputs = stage.lengths.inputs if model.has_encoder else 0
        targets = row_length(model.architecture, stage.lengths) if model.has_decoder else 0
        return inputs, targets

    networks = [each for each in stages(experiment) if isinstance(each, NetworkStage) and each.has_text_model]
    if not networks:
        raise SettingError(
            f"--costs: {name} counts its text (counts.model={experiment.counts.model!r}) and has no matrices"
        )
    last_phases = [stage for stage in networks if stage.is_pretraining and stage.is_compared]
    last = (last_phases or networks)[0]
    inputs, targets = sequence_lengths(last, experiment.model)
    tokens = 0
    phase: Stage | None = last
    while isinstance(phase, NetworkStage) and phase in networks:
        if phase.is_pretraining and not phase.is_start_pretraining:
            length = sum(sequence_lengths(phase, phase.settings.model))
            tokens += phase.num_steps * phase.training.batch_size * length
        phase = phase.parent
    return TokensRead(inputs, targets, tokens)


def show_costs(
    model: ModelConfig,
    title: str,
    inputs: int,
    targets: int,
    batch: int,
    dtype: Dtype | None,
    tokens: float,
    generator: ModelConfig | None = None,
) -> None:
    """Print the costs of training and decoding, which follow from the settings: nothing is compiled.

    inputs, targets: lengths of rows; a decoder has no inputs, an encoder no targets [tokens].
    dtype: type of the cache; None: that in which the model computes.
    generator: ELECTRA's, which is trained in the same steps; its parameters are not the model's.
    """
    from lm.train.flops import cache_bytes, check_length, costs  # needs jax, which settings do not

    length = inputs if model.has_encoder else targets
    longest = max(length, targets if model.has_decoder else 0)
    for name, value, least in (("length", longest, 1), ("batch", batch, 1), ("tokens", tokens, 0)):
        if not least <= value < inf:
            finite = " and finite" * isinstance(value, float)
            raise SettingError(f"--{name}={value} should be at least {least}{finite}")
    if not model.has_decoder and (batch != 1 or dtype is not None):
        raise SettingError(
            "--batch and --dtype are of the cache by which a decoder generates, and an encoder has none: "
            "leave them out"
        )
    check_length(model, longest, "--length")
    dtype = dtype or model.dtype
    model = changes(model, {"dtype": dtype, "attention.implementation": "auto"})
    found = costs(model, length, targets)
    rows = f"{length:,} tokens"
    if model.has_encoder and model.has_decoder:
        rows = f"{inputs:,} inputs and {targets:,} targets"
    grid = listing("quantity", "value", title=f"{title}: rows of {rows}")
    grid.add_row(
        "parameters N",
        f"{found.parameters:,} with embeddings, {found.non_embedding_parameters:,} without",
    )
    if model.experts.count:
        grid.add_row(
            "active parameters",
            f"{found.active_parameters:,} with embeddings, {found.active_non_embedding_parameters:,} without",
        )
    scores = f"{found.scores / found.training:.1%} of it attention's scores"
    grid.add_row("training, per token", f"{found.training:.4g} FLOP by count, {scores}")
    training = found.training
    if generator is not None:
        grid.add_row("its generator", generator_sizes(generator, model))
        of_generator = costs(generator, length, targets).training
        training += of_generator
        grid.add_row("of its generator, per token", f"{of_generator:.4g} FLOP more by count")
    estimates = {
        "N with embeddings": 6.0 * found.active_parameters,
        "N without embeddings": 6.0 * found.active_non_embedding_parameters,
    }
    for which, estimate in estimates.items():
        ratio = f"the count is {found.training / estimate:.3g} times this"
        grid.add_row(f"6 N, {which}", f"{estimate:.4g} FLOP: {ratio}")
    if tokens:
        grid.add_row(f"training on {tokens:.4g} tokens D", f"{training * tokens:.4g} FLOP by count")
        for which, estimate in estimates.items():
            grid.add_row(f"6 N D, {which}", f"{estimate * tokens:.4g} FLOP")
    if model.has_decoder:
        token = found.cache - cache_bytes(model, targets - 1, length)
        grid.add_row("generating, per token", f"{found.generating:.4g} FLOP")
        grid.add_row("cache, per token", f"{binary_size(token)} in {dtype}")
        grid.add_row(f"cache of {batch:,} such row{'s' * (batch != 1)}", binary_size(batch * found.cache))
    CONSOLE.print(grid)
    if model.architecture == "encoder-decoder":
        CONSOLE.print(
            "D counts inputs and targets; each token passes one of the two stacks, where 6 N D counts both.",
            highlight=False,
        )


def show_stages(experiment: Experiment, folder: Path, cache: Path, title: str) -> None:
    """Print a line per stage: what it is trained on, what it starts from, its steps and its folder."""
    from experiments.runs.stages import stages  # with jax
    from experiments.runs.status import saved_steps

    headings, rows = ("stage", "trained on", "starts from", "steps", "saved", "folder"), []
    for stage in stages(experiment, folder, cache):
        saved = max(saved_steps(stage.folder), default=None)
        if saved == 0:  # before the first step: the model was trained elsewhere
            rows.append((stage.name, MISSING, "the imported model", MISSING, MISSING, relative(stage.folder)))
            continue
        data = ", ".join(
            (stage.settings.data.corpus, *stage.task_names) if stage.reads_corpus else stage.task_names
        )
        parent = stage.parent.name if stage.parent else stage.start_without_parent
        if stage.parent and stage.parent_step != stage.parent.training.steps:
            parent += f", step {stage.parent_step:,}"
        steps = f"{stage.training.steps:,}"
        if stage.first_step:  # a phase counts on from the one before it
            steps = f"{stage.first_step + 1:,} to {steps}"
        rows.append((stage.name, data, parent, steps, f"{saved or 0:,}", relative(stage.folder)))
    show_listing(headings, rows, title)
