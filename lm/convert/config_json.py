"""From a config.json to our settings, and from our settings to a config.json that means the same, if any."""

import functools
import json
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict

from lm.convert.families import FAMILIES
from lm.convert.family import OPTIONAL, REQUIRED, Family, Json, values
from lm.convert.unread import check_fields
from lm.nn.config import ModelConfig
from lm.settings import SettingError, from_json, leaves, nearest

# what a model has or lacks beside its blocks: the module of ours by whose tensor it is known
PARTS = values(
    "logits=logits_bias pooler=pooler next-sentence=next_sentence sentence-order=sentence_order "
    "replaced-token=replaced.out"
)
MATRIX = "matrix"  # the part that is an output matrix other than the embedding
_SCALINGS = values("default=none linear=linear llama3=llama3 yarn=yarn")
_STRETCH = values(
    "factor=factor original_max_position_embeddings=original_length low_freq_factor=low_frequency_factor "
    "high_freq_factor=high_frequency_factor beta_fast=beta_fast beta_slow=beta_slow"
)
_YARN, _LLAMA3 = ("beta_",), ("low_", "high_")
_UNSTRETCHED = {  # what a way of stretching does not read
    "none": ("factor", "original_", *_YARN, *_LLAMA3),
    "linear": ("original_", *_YARN, *_LLAMA3),
    "llama3": _YARN,
    "yarn": _LLAMA3,
}


def family_of(theirs: Json) -> str:
    """The family that a config.json names."""
    family = theirs.get("model_type")
    if family not in FAMILIES:
        near = nearest(str(family), FAMILIES)
        raise SettingError(f"config.json: model_type={family!r} is not supported{near}")
    return family


def parts_in(theirs: Json, names: Collection[str]) -> set[str]:
    """The parts that the class in a config.json has, and others of which there are tensors.

    Published files often hold more than their class names: BERT's, a masked LM, the next-sentence head too.
    """
    family = family_of(theirs)
    modules, classes = FAMILIES[family].modules, FAMILIES[family].parts
    due = set().union(*(classes.get(name, ()) for name in theirs.get("architectures") or ()))
    marks = {part: modules[module] for part, module in PARTS.items() if module in modules}
    return due | {part for part, mark in marks.items() if {mark, f"{mark}.weight"} & set(names)}


def parts_of(config: ModelConfig) -> set[str]:
    """The parts of one of our models."""
    outputs = {"logits": config.logits_bias, MATRIX: config.logits.startswith("separate")}
    return {*config.heads, *(part for part, there in outputs.items() if there)}


def model_config(theirs: Json, parts: Collection[str]) -> ModelConfig:
    """Our settings from theirs; SettingError for what is missing or not implemented."""
    family = family_of(theirs)
    table, modules = FAMILIES[family], FAMILIES[family].modules
    check_fields(theirs, table)
    theirs = {new: theirs[old] for old, new in table.usual_names.items() if old in theirs} | theirs
    matrix = MATRIX in parts
    parts = [part for part, module in PARTS.items() if part in parts and module in modules]
    ours: Json = {}
    for key in table.keys:
        value = theirs.get(key.theirs, key.default)
        if value is OPTIONAL:
            continue
        if key.default is REQUIRED and not isinstance(value, int):
            fault = " is missing" if value is REQUIRED else f"={value!r} should be a number"
            raise SettingError(f"config.json: {key.theirs}{fault}")
        value = key.read(value, theirs)
        if ours.setdefault(key.ours, value) != value:
            given = f"{key.theirs}={theirs[key.theirs]!r}"
            raise SettingError(f"config.json: {given} should be {ours[key.ours]!r} here too")
    if "transform.dense" in modules:
        output = "logits" in parts
        ours |= {"logits": "tied" if output else "none", "logits_transform": output}
    ours |= {"logits_bias": "logits" in parts, "heads": [part for part in parts if part != "logits"]}
    if matrix and table.says_tied:
        ours["logits"] = ours["logits"].replace("tied", "separate")
    ours |= _read_rotary(theirs, table)
    for path, value in table.fixed.items():
        ours[path] = value(ours) if callable(value) else value
    for side in ("", "encoder."):
        heads = ours.get(f"{side}num_heads")
        if heads is not None and f"{side}d_kv" not in ours:
            if heads < 1 or ours["d_model"] % heads:
                raise SettingError(f"{heads} heads should divide a width of {ours['d_model']}")
            ours[f"{side}d_kv"] = ours["d_model"] // heads
    return _built(ours)


def _built(ours: Json) -> ModelConfig:
    """The settings at these dotted paths, the others as they are by default; checked."""
    settings = asdict(ModelConfig())
    for path, value in ours.items():
        *groups, name = path.split(".")
        functools.reduce(operator.getitem, groups, settings)[name] = value
    return from_json(ModelConfig, json.dumps(settings))


def config_json(config: ModelConfig) -> Json:
    """The config.json of the family that means exactly ``config``; SettingError if none does.

    A published one stays as it is, but for what has been changed since.
    """
    due, unfit = meaning(config), dict[str, list[str]]()
    for family, write in _writers(config):
        try:
            theirs = write(family, config)
            back = meaning(model_config(theirs, parts_of(config)))
        except SettingError as error:
            unfit[family] = [str(error)]
            continue
        other = {path: value for path, value in due.items() if value != back.get(path)}
        unfit[family] = [
            f"model.{path}={value!r} should be {back.get(path)!r}" for path, value in other.items()
        ]
        if not unfit[family]:
            return theirs
    family, faults = min(unfit.items(), key=lambda item: len(item[1]))
    raise SettingError(f"no published family computes this model; to be a {family}, {', '.join(faults)}")


def _writers(config: ModelConfig) -> Iterator[tuple[str, Callable[[str, ModelConfig], Json]]]:
    """The families that may compute a model, and how they are written; the one that it came from is first."""
    if config.published:
        source = family_of(json.loads(config.published))
        yield from ((source, _revise), (source, _write))
    yield from ((family, _write) for family in FAMILIES)


def _revise(family: str, config: ModelConfig) -> Json:
    """The published config.json with the settings that are other ones now; weights are written in float32."""
    theirs, table, now = json.loads(config.published), FAMILIES[family], dict(leaves(config))
    before = dict(leaves(model_config(theirs, parts_of(config))))
    changed = [key for key in table.keys if now[key.ours] != before[key.ours]]
    theirs |= {key.theirs: key.write(now[key.ours], config) for key in changed}
    if any(now[path] != before[path] for path in now if path.startswith("rotary.")):
        theirs = {key: value for key, value in theirs.items() if key != "rope_parameters"}
        theirs |= _write_rotary(config, table)
    return theirs | {key: "float32" for key in ("dtype", "torch_dtype") if key in theirs}


def _write(family: str, config: ModelConfig) -> Json:
    table, settings, parts = FAMILIES[family], dict(leaves(config)), parts_of(config)
    classes = [name for name, due in table.parts.items() if due <= parts]
    theirs: Json = {"model_type": family, "architectures": classes[:1]}
    theirs |= {"dtype": "float32", "torch_dtype": "float32"}
    theirs |= {key: value for key, value in table.only.items() if value is not None}
    theirs |= {key.theirs: key.write(settings[key.ours], config) for key in table.keys}
    return theirs | _write_rotary(config, table)


def _read_rotary(theirs: Json, table: Family) -> Json:
    """Both spellings: rope_theta and rope_scaling (transformers 4), or rope_parameters alone (5)."""
    if table.rotary is None:
        return {}
    base, fraction, usual = table.rotary
    old = {
        "rope_theta": theirs.get(base, 10_000.0),
        "partial_rotary_factor": theirs.get(fraction or "", usual),
    }
    given = old | {key: theirs[key] for key in old if key in theirs}
    given |= {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    kind = given.pop("rope_type", given.pop("type", "default"))
    if kind not in _SCALINGS:
        raise SettingError(f"config.json: rope_type={kind!r} is not supported{nearest(str(kind), _SCALINGS)}")
    base, share = given.pop("rope_theta"), given.pop("partial_rotary_factor")
    if fraction is None and share != usual:
        raise SettingError(f"config.json: partial_rotary_factor={share!r} is not supported, only {usual}")
    ours = {"rotary.base": base, "rotary.fraction": share, "rotary.scaling": _SCALINGS[kind]}
    if kind != "default":
        ours["rotary.original_length"] = theirs.get("max_position_embeddings", 2_048)
    for key, value in given.items():
        if value is not None and key in _STRETCH:
            ours[f"rotary.{_STRETCH[key]}"] = value
        elif value is not None and (key, value) != ("truncate", True):
            raise SettingError(f"config.json: {key}={value!r} of rotary positions is not supported")
    return ours


def _write_rotary(config: ModelConfig, table: Family) -> Json:
    """As transformers 4 has it, which 5 reads too."""
    if table.rotary is None:
        return {}
    rotary, (base, fraction, _), scaling = config.rotary, table.rotary, None
    if rotary.scaling != "none":
        unread = _UNSTRETCHED[rotary.scaling]
        scaling = {"rope_type": rotary.scaling}
        scaling |= {k: getattr(rotary, ours) for k, ours in _STRETCH.items() if not ours.startswith(unread)}
    partial = {} if fraction is None else {fraction: rotary.fraction}
    return {base: rotary.base, **partial, "rope_scaling": scaling}


def meaning(config: ModelConfig) -> Json:
    """The settings that decide which function a model computes, of those alone that are read by it."""
    settings = dict(leaves(config)) | {
        "num_key_value_heads": config.key_value_heads,
        "d_v": config.value_width,
    }
    settings |= {"mlp_bias": config.mlp_has_bias, "qkv_bias": config.qkv_has_bias}
    settings |= {"heads": tuple(sorted(config.heads))}
    unread = ["published", "special.", "dropout", "dtype", "layers", "remat"]
    unread += ["relative_bias_start", "cross_attention_start"]  # only of a new model
    unread += [] if config.has_encoder else ["num_encoder_layers"]
    unread += [] if config.has_decoder else ["num_decoder_layers"]
    unread += [] if config.positions == "learned" else ["max_length", "position_offset"]
    unread += [] if config.positions == "sinusoidal" else ["sinusoid"]
    unread += [] if config.positions.startswith("relative") else ["relative_"]
    unread += [] if config.positions == "rotary" else ["rotary."]
    unread += [] if config.d_embed else ["projected"]
    unread += [f"rotary.{name}" for name in _UNSTRETCHED[config.rotary.scaling]]
    return {path: value for path, value in settings.items() if not path.startswith(tuple(unread))}
