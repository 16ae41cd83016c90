"""What is wrong with the words of a command line, in a line that names the mend; before anything is done."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import takewhile
from math import inf

from experiments.cli.usage.options import NO_DEFAULT, Taken
from experiments.cli.usage.page import opposite, usage
from lm.config.base import SettingError, nearest

OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
BOTH = ("pretraining", "finetuning")
LAYERS = ("model.num_encoder_layers", "model.num_decoder_layers")
STEPS = ("pretraining.steps", "finetuning.steps")
SAME_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (  # settings, options and what other programs call them
    (tuple(f"{each}.optimizer.learning_rate" for each in BOTH), "lr learning-rate base-lr peak-lr max-lr"),
    (
        tuple(f"{each}.optimizer.schedule" for each in BOTH),
        "lr-schedule lr-scheduler lr-scheduler-type decay lr-decay",
    ),
    (tuple(f"{each}.optimizer.warmup_steps" for each in BOTH), "warmup warmup-ratio num-warmup-steps"),
    (tuple(f"{each}.optimizer.name" for each in BOTH), "optim optimizer"),
    (tuple(f"{each}.optimizer.weight_decay" for each in BOTH), "wd"),
    (tuple(f"{each}.optimizer.beta1" for each in BOTH), "adam-beta1 betas b1"),
    (tuple(f"{each}.optimizer.beta2" for each in BOTH), "adam-beta2 b2"),
    (tuple(f"{each}.optimizer.epsilon" for each in BOTH), "eps adam-epsilon adam-eps"),
    (
        tuple(f"{each}.optimizer.clip_norm" for each in BOTH),
        "clip grad-clip clip-grad grad-norm max-grad-norm gradient-clipping clip-grad-norm gradient-clip-val",
    ),
    (
        STEPS,
        "max-steps num-steps total-steps train-steps num-train-steps iterations max-iters",
    ),
    ((*STEPS, "data.repeats"), "epochs num-epochs num-train-epochs max-epochs"),
    (
        tuple(f"{each}.batch_size" for each in BOTH),
        "batch train-batch-size global-batch-size per-device-train-batch-size device-batch-size",
    ),
    (
        ("pretraining.microbatches", "finetuning.microbatches"),
        "grad-accum gradient-accumulation gradient-accumulation-steps accumulate-grad-batches "
        "micro-batch-size",
    ),
    (("pretraining.evaluate_every",), "eval-every eval-interval eval-steps eval-freq val-check-interval"),
    (tuple(f"{each}.save_every" for each in BOTH), "save-steps save-interval checkpoint-every ckpt-every"),
    (tuple(f"{each}.log_every" for each in BOTH), "log-interval logging-steps log-steps log-freq"),
    (LAYERS, "layers num-layers n-layer n-layers num-hidden-layers num-blocks n-blocks depth"),
    (LAYERS[:1], "encoder-layers num-encoder-blocks"),
    (LAYERS[1:], "decoder-layers num-decoder-blocks"),
    (("model.attention.num_heads", "tuning.heads"), "heads"),
    (("model.attention.num_heads",), "n-head n-heads num-attention-heads attention-heads nhead"),
    (("model.attention.num_key_value_heads",), "kv-heads num-kv-heads n-kv-heads n-kv-head num-query-groups"),
    (("model.attention.d_kv",), "d-head head-dim d-k head-size dim-head kv-channels"),
    (("model.d_model",), "hidden-size hidden-dim width dim n-embd emb-dim embed-dim embedding-dim dmodel"),
    (
        ("model.mlp.d_ff",),
        "ffn ff d-ffn d-hidden d-inner n-inner ffn-dim mlp-dim mlp-width intermediate-size ffn-hidden-size "
        "feed-forward-dim dim-feedforward",
    ),
    (
        ("model.mlp.activation",),
        "activation activation-function act act-fn hidden-act nonlinearity feed-forward feed-forward-proj "
        "gelu swiglu geglu",
    ),
    (
        ("model.dropout",),
        "dropout-rate dropout-p attention-dropout attn-dropout attn-pdrop resid-pdrop hidden-dropout "
        "hidden-dropout-prob attention-probs-dropout-prob",
    ),
    (
        ("model.positions.kind",),
        "position-encoding positional-encoding position-embedding-type pos-emb pos-encoding rope rotary "
        "alibi relative-positions",
    ),
    (("model.positions.rotary.base",), "rope-theta rope-base rotary-base"),
    (("model.positions.max_length",), "max-len max-position-embeddings n-positions n-ctx"),
    (("model.norm.kind",), "layernorm layer-norm rmsnorm rms-norm norm-type normalization"),
    (("model.residual",), "pre-norm prenorm post-norm postnorm norm-first"),
    (("model.norm.epsilon",), "norm-eps layer-norm-eps layer-norm-epsilon rms-norm-eps"),
    (("model.output.logits",), "tie-embeddings tie-word-embeddings tied tied-embeddings weight-tying"),
    (("model.bias",), "use-bias"),
    (("model.sparsity.window",), "sliding-window attention-window local-window"),
    (
        ("model.attention.implementation",),
        "flash flash-attention attn-implementation attention-implementation attn-impl",
    ),
    (("model.dtype",), "precision mixed-precision bf16 fp16 bfloat16 amp"),
    (
        ("model.compile.remat",),
        "gradient-checkpointing activation-checkpointing grad-checkpointing recompute",
    ),
    (("model.architecture",), "arch model-type"),
    (("model.lora.rank", "tuning.lora.rank"), "lora lora-rank lora-r"),
    (("data.inputs_length", "tuning.inputs_length"), "seq-len seq-length sequence-length sequence-len"),
    (
        ("data.inputs_length", "tuning.inputs_length"),
        "max-seq-length max-seq-len block-size context context-length context-size input-length",
    ),
    (("data.corpus",), "dataset data train-data train-file data-path corpus-path"),
    (("data.vocabulary",), "tokenizer vocab vocabulary-file"),
    (("data.vocabulary_size", "model.vocab_size"), "vocab-size n-vocab"),
    (("objective.rate",), "mask-rate mask-prob mlm-probability corruption-rate noise-density masking-rate"),
    (("objective.mean_span_length",), "span-length mean-noise-span-length"),
    (("tuning.mixtures", "tuning.heads"), "task tasks mixture"),
    (("mesh.tensor",), "tp tensor-parallel tensor-parallel-size model-parallel"),
    (("mesh.data",), "dp data-parallel"),
    (("seed",), "random-seed seeds"),
    (("seeds",), "num-seeds"),
    (("runs",), "output-dir out-dir output outdir dir save-dir workdir logdir log-dir"),
    (("run",), "checkpoint model-path"),
    (("wandb",), "wandb-project project"),
    (("beams",), "num-beams beam-size"),
    (("max_length",), "max-new-tokens max-tokens"),
    (("temperature",), "do-sample"),
    (("prompt",), "prompts"),
)
MEANT = {word: names for names, words in SAME_WORDS for word in words.split()}
ALIKE = 0.65  # share of the letters of an option and of what may be misspelt that agree, at least
RESUMES = ("resume", "continue", "resume-from-checkpoint", "restore")


def places_first(taken: Sequence[Taken], arguments: Sequence[str]) -> list[str]:
    """Return the words that stand in a place, then the options with their values, each in its order.

    An option that takes several values takes all words up to the next option, but for the last, where a word
    that has to stand in a place would be lacking.
    """
    flags = {each.flag: each for each in taken if not each.in_place}
    before = list(takewhile(lambda word: word != "--", arguments))
    places: list[str] = []
    options: list[str] = []
    due, spare = 0.0, 0  # values that an option may still take; where the last of several stands
    for word in before:
        if is_option(word):
            name, equals, _ = word.partition("=")
            option = flags.get(name.replace("_", "-"))
            takes_value = option is not None and option.kind is not bool and not equals
            due = (inf if option.several else 1) if option is not None and takes_value else 0
            options.append(word)
        elif due:
            if due == inf and not is_option(options[-1]):  # not its only value
                spare = len(options)
            due -= 1
            options.append(word)
        else:
            places.append(word)
    if spare and len(places) < len(required(taken)):
        places.append(options.pop(spare))
    return [*places, *options, *arguments[len(before) :]]


def required(taken: Sequence[Taken]) -> list[Taken]:
    """Return what has to stand in a place."""
    return [each for each in taken if each.in_place and each.default is NO_DEFAULT]


def as_typed(message: str, names: Collection[str]) -> str:
    """Return an error's message with the settings and options of these ``names`` as a user types them.

    A setting such as ``model.mlp.d_ff`` is known by its name, an option such as ``beams`` only with its
    value. Names before a colon, as in a list of what differs, stay.
    """
    dotted = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if "." in name)
    plain = "|".join(re.escape(name) for name in names if "." not in name)
    found = [rf"(?:{dotted})(?![\w.:]|-\w)"] * bool(dotted) + [rf"(?:{plain})(?==)"] * bool(plain)
    return re.sub(rf"(?<![\w.,:/'\"-])({'|'.join(found)})", r"--\1", message) if found else message


def check_words(taken: Sequence[Taken], arguments: Sequence[str]) -> None:
    """SettingError for an option that the command has not, one without its value, and a value of no use."""
    flags = {each.flag: each for each in taken if not each.in_place}
    switches = {opposite(each): each for each in flags.values() if each.kind is bool}
    for number, word in enumerate(takewhile(lambda word: word != "--", arguments)):
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
        if equals:
            check_word(flag, flags[flag], value)
        else:
            _check_value(flags[flag], arguments[number + 1 :])


def opposite_of(flag: str) -> str:
    """``--no-check`` of ``--check`` and back."""
    group, dot, last = flag[2:].rpartition(".")
    return f"--{group}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"


def meant(flag: str, flags: Collection[str]) -> str:
    """``"; did you mean --a or --b?"``: by what others call it, by the end of a name, or by spelling."""
    word = flag.lstrip("-")
    if word in RESUMES:
        return ": the same command resumes where it stopped"
    group, _, last = word.rpartition(".")
    named = [f"--{name.replace('_', '-')}" for name in MEANT.get(word) or MEANT.get(last, ())]
    named = [known for known in named if known.startswith(f"--{group}.")] or named
    ends = [known for known in flags if known.endswith((f".{word}", f".no-{word}")) and "markov" not in known]
    found = [known for known in named if known in flags] or sorted(ends, key=_likelihood)
    found = found or [known for known in flags if known.startswith(f"--{word}")]
    if found:
        return f"; did you mean {' or '.join(found[:3])}?"
    close = get_close_matches(f"--{word}", flags, n=1, cutoff=ALIKE)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"


def _likelihood(flag: str) -> tuple[int, str]:
    """By which the groups of a setting that several have are listed."""
    groups = ("--pretraining", "--finetuning", "--model", "--data", "--tuning", "--objective")
    return next((rank for rank, group in enumerate(groups) if flag.startswith(group)), len(groups)), flag


def _qualified(message: str, group: str, names: Collection[str]) -> str:
    """Return a message about a ``group`` of settings with its ``names`` in full."""
    parts = group.split(".")
    outer = ["".join(f"{part}." for part in parts[:depth]) for depth in range(len(parts), -1, -1)]

    def whole(match: re.Match[str]) -> str:
        named = [prefix + match[0] for prefix in outer if prefix + match[0] in names]
        inside = [name for name in named if name.startswith(f"{group}.")]
        return next(iter(inside or named), match[0])

    return re.sub(r"(?<![\w.,/'\"-])[\w.]+(?==)", whole, message)


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


def lacking(taken: Sequence[Taken], program: str) -> str:
    """Return what to say where something is not given that has to be."""
    places = [each for each in taken if each.in_place]
    due = [each.value for each in required(taken)]
    due += [f"{x.flag} {x.value}" for x in taken if not x.in_place and x.default is NO_DEFAULT]
    return f"{program} needs {' and '.join(due)}: {usage(program, places)}; see {program} --help"


def as_line(box: str, taken: Sequence[Taken], program: str) -> str:
    """Return the parser's message, which it puts into a box, in a line."""
    parts = [line.strip("│╭╮╰╯─┬┴ \t") for line in box.splitlines()]
    text = " ".join(part for part in parts if part and "full helptext" not in part)
    places = [each for each in taken if each.in_place]
    wanted, more = usage(program, places), f"; see {program} --help"
    if "equired" in text.partition(":")[0]:
        return lacking(taken, program)
    if match := re.search(r"Unrecognized options?:\s*(.*)", text):
        return f"{match[1]!r} is one word too many: {wanted}; quote a text with blanks{more}"
    if match := re.search(r"Error parsing (?:settings|options|rows)?\.?([\w.-]*): (.*)", text):
        return _qualified(match[2], match[1], {each.name for each in taken})
    return text.removeprefix("Parsing error ") + more
