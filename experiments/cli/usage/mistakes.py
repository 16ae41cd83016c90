"""What is wrong with the words of a command line, in a line that names the mend; before anything is done."""

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

from experiments.cli.usage.options import NO_DEFAULT, Taken
from experiments.cli.usage.page import opposite, usage
from lm.settings import SettingError, nearest

OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
LAYERS = ("model.num_encoder_layers", "model.num_decoder_layers")
RATES = ("pretraining.optimizer.learning_rate", "finetuning.optimizer.learning_rate")
WIDTHS = ("model.d_model",)
ROW_LENGTHS = ("data.inputs_length", "tuning.inputs_length")
FOLDERS = ("runs",)
MEANT = {  # what other programs call it -> the settings and options that are meant here
    "lr": RATES,
    "learning-rate": RATES,
    "max-steps": ("pretraining.steps", "finetuning.steps"),
    "num-steps": ("pretraining.steps", "finetuning.steps"),
    "iterations": ("pretraining.steps", "finetuning.steps"),
    "epochs": ("pretraining.steps", "finetuning.steps", "data.repeats"),
    "num-epochs": ("pretraining.steps", "finetuning.steps", "data.repeats"),
    "batch": ("pretraining.batch_size", "finetuning.batch_size"),
    "grad-accum": ("pretraining.microbatches",),
    "gradient-accumulation-steps": ("pretraining.microbatches",),
    "layers": LAYERS,
    "num-layers": LAYERS,
    "n-layer": LAYERS,
    "heads": ("model.num_heads", "tuning.heads"),
    "n-head": ("model.num_heads",),
    "num-attention-heads": ("model.num_heads",),
    "hidden-size": WIDTHS,
    "width": WIDTHS,
    "dim": WIDTHS,
    "n-embd": WIDTHS,
    "seq-len": ROW_LENGTHS,
    "seq-length": ROW_LENGTHS,
    "max-seq-length": ROW_LENGTHS,
    "block-size": ROW_LENGTHS,
    "context-length": ROW_LENGTHS,
    "dataset": ("data.corpus",),
    "data": ("data.corpus",),
    "tokenizer": ("data.vocabulary",),
    "vocab": ("data.vocabulary",),
    "optimizer": ("pretraining.optimizer.name", "finetuning.optimizer.name"),
    "warmup": ("pretraining.optimizer.timescale", "finetuning.optimizer.timescale"),
    "precision": ("model.dtype",),
    "bf16": ("model.dtype",),
    "fp16": ("model.dtype",),
    "position-encoding": ("model.positions",),
    "mask-rate": ("objective.rate",),
    "mlm-probability": ("objective.rate",),
    "output-dir": FOLDERS,
    "out-dir": FOLDERS,
    "dir": FOLDERS,
    "checkpoint": ("run",),
    "seeds": ("seed",),
    "num-beams": ("beams",),
    "max-new-tokens": ("max_length",),
    "do-sample": ("temperature",),
    "prompts": ("prompt",),
}
RESUMES = ("resume", "continue", "resume-from-checkpoint", "restore")


def check_words(taken: Sequence[Taken], arguments: Sequence[str]) -> None:
    """SettingError for an option that the command has not, one without its value, and a value of no use."""
    flags = {each.flag: each for each in taken if not each.in_place}
    switches = {opposite(each): each for each in flags.values() if each.kind is bool}
    for number, word in enumerate(arguments):
        if not is_option(word):
            continue
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in switches or flag in flags and flags[flag].kind is bool:
            if equals:
                raise SettingError(f"{word}: {name} takes no value; its opposite is {opposite_of(flag)}")
            continue
        if flag not in flags:
            raise SettingError(f"there is no option {name}{meant(flag, [*flags, *switches])}")
        rest = [value] if equals else arguments[number + 1 :]
        _check_value(flags[flag], rest)


def opposite_of(flag: str) -> str:
    """``--no-check`` of ``--check`` and back."""
    group, dot, last = flag[2:].rpartition(".")
    return f"--{group}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"


def meant(flag: str, flags: Collection[str]) -> str:
    """``"; did you mean --a or --b?"``: by what others call it, by the end of a name, or by spelling."""
    word = flag.lstrip("-")
    if word in RESUMES:
        return ": the same command resumes where it stopped"
    named = [f"--{name.replace('_', '-')}" for name in MEANT.get(word, ())]
    ends = [known for known in flags if known.endswith((f".{word}", f".no-{word}")) and "markov" not in known]
    found = [known for known in named if known in flags] or sorted(ends, key=_likelihood)
    found = found or [known for known in flags if known.startswith(f"--{word}")]
    if found:
        return f"; did you mean {' or '.join(found[:3])}?"
    return nearest(f"--{word}", flags).replace("'", "") or "; --help lists all"


def _likelihood(flag: str) -> tuple[int, str]:
    """By which the groups of a setting that several have are listed."""
    groups = ("--pretraining", "--finetuning", "--model", "--data", "--tuning", "--objective")
    return next((rank for rank, group in enumerate(groups) if flag.startswith(group)), len(groups)), flag


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_value(option: Taken, words: Sequence[str]) -> None:
    """SettingError if no value, or one that is not of its kind, follows."""
    values = list(takewhile(lambda word: not is_option(word), words))
    if not values and not option.several:
        raise SettingError(f"{option.flag} lacks its value: {option.flag} {option.value}")
    for value in values if option.several else values[:1]:
        check_word(option.flag, option, value)


def is_option(word: str) -> bool:
    """Whether it is neither a value nor a number."""
    name = word.partition("=")[0]
    return bool(OPTION.fullmatch(name)) and not _is_number(word)


def check_word(flag: str, option: Taken, word: str) -> None:
    """SettingError if a value is no number, or none of the choices, where it has to be."""
    kind, said = option.scalar, f"{flag} {word!r}"
    if word == "None" and option.kind is not kind:
        return
    if kind is int:
        try:
            whole_number(word)
        except ValueError as error:
            raise SettingError(f"{flag}: {error}") from error
    if kind is float and not _is_number(word):
        raise SettingError(f"{said} should be a number, such as 0.1 or 1e-3")
    if option.choices and word not in option.choices:
        raise SettingError(f"{said} is not a choice{nearest(word, option.choices)}")


def whole_number(text: str) -> int:
    """``"20000"``, ``"20_000"`` and ``"2e4"`` alike."""
    for kind in (int, float):
        try:
            number = kind(text)
            if number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    raise ValueError(f"{text!r} should be a whole number, such as 20000 or 2e4")


def as_line(box: str, taken: Sequence[Taken], program: str) -> str:
    """The parser's message, which it puts into a box, in a line."""
    parts = [line.strip("│╭╮╰╯─┬┴ \t") for line in box.splitlines()]
    text = " ".join(part for part in parts if part and "full helptext" not in part)
    places = [each for each in taken if each.in_place]
    wanted, more = usage(program, places), f"; see {program} --help"
    if "equired" in text.partition(":")[0]:
        lacking = [each.value for each in places if each.default is NO_DEFAULT]
        lacking += [f"{x.flag} {x.value}" for x in taken if not x.in_place and x.default is NO_DEFAULT]
        return f"{program} needs {' and '.join(lacking)}: {wanted}{more}"
    if match := re.search(r"Unrecognized options?:\s*(.*)", text):
        return f"{match[1]!r} is one word too many: {wanted}; quote a text with blanks{more}"
    if match := re.search(r"Error parsing (?:settings|options|rows)?\.?([\w.-]*): (.*)", text):
        group, said = match[1].rpartition("."), match[2]
        return f"{group[0]}.{said}" if group[2] and said.startswith(f"{group[2]}.") else said
    return text.removeprefix("Parsing error ") + more
