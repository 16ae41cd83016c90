"""Convert a config.json to our settings, and our settings to a config.json that means exactly the same."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from operator import attrgetter
from typing import NamedTuple

from lm.config.base import SettingError, did_you_mean, from_json, leaves
from lm.config.model import ModelConfig
from lm.convert.families import FAMILIES, UNSUPPORTED
from lm.convert.fields import DISENTANGLED_SETTINGS, head_width, unused_rope_settings
from lm.convert.known_fields import check_fields
from lm.convert.schema import Family, HFConfig, PretrainingHead, Settings

# The parameter of each pre-training head whose tensor shows that a checkpoint has the head.
HEAD_PARAMETERS: dict[PretrainingHead, str] = {
    "logits": "logits_bias",
    "pooler": "pooler.kernel",
    "next-sentence": "next_sentence.kernel",
    "sentence-order": "sentence_order.kernel",
    "replaced-token": "replaced.out.kernel",
    "query-stream": "query_embedding",
}

# Settings in which models of a family differ though no field has them: they follow from the width, and heads
# from the class.
VARYING = {"attention.d_kv", "attention.d_v", "attention.query_pre_attn_scalar", "heads"}


def family_of(hf_config: HFConfig) -> Family:
    """Return the family that a config.json names; SettingError if it is none of ours."""
    model_type = hf_config.get("model_type")
    if model_type in UNSUPPORTED:
        raise SettingError(
            f"config.json: model_type={model_type!r} is not supported: {UNSUPPORTED[str(model_type)]}"
        )
    if model_type not in FAMILIES:
        near = did_you_mean(str(model_type), FAMILIES)
        raise SettingError(f"config.json: model_type={model_type!r} is not supported{near}")
    return FAMILIES[model_type]


def pretraining_heads_of_checkpoint(
    hf_config: HFConfig, tensor_names: Collection[str]
) -> set[PretrainingHead]:
    """Return the pre-training heads of the class that a config.json names, and others that have tensors.

    Published files often hold more than their class: BERT's name a masked LM and hold the next-sentence head.
    """
    family = family_of(hf_config)
    heads: set[PretrainingHead] = set()
    for architecture in hf_config.get("architectures") or ():
        heads |= {*family.architectures.get(architecture, ())}
    for head, path in HEAD_PARAMETERS.items():
        parameter = family.parameters.get(path)
        if parameter is not None and parameter.tensor_name(None, None) in tensor_names:
            heads.add(head)
    return heads


def pretraining_heads_of_config(config: ModelConfig) -> set[str]:
    """Return the pre-training heads of one of our models.

    "logits" is among them if an encoder has an output layer, or that of a model with a decoder a bias.
    """
    has_logits = config.output.bias
    if config.architecture == "encoder":
        has_logits = config.output.logits != "none"
    return {*config.heads, "logits"} if has_logits else {*config.heads}


def flatten_sections(hf_config: HFConfig, family: Family) -> HFConfig:
    """Return a config.json with the fields of each section at the top, named as in "encoder.hidden_size"."""
    flat = {name: value for name, value in hf_config.items() if name not in family.sections}
    for section in family.sections:
        fields = hf_config.get(section)
        if not isinstance(fields, dict):
            raise SettingError(f"config.json: {section}={fields!r} should hold the fields of a stack by name")
        flat |= {f"{section}.{name}": value for name, value in fields.items()}
    return flat


def nest_sections(flat: HFConfig, family: Family) -> HFConfig:
    """Undo ``flatten_sections``: move each field such as "encoder.hidden_size" into its section "encoder"."""
    hf_config: HFConfig = {section: {} for section in family.sections}
    for name, value in flat.items():
        section, _, field = name.partition(".")
        if field and section in family.sections:
            hf_config[section][field] = value
        else:
            hf_config[name] = value
    return hf_config


# --- from config.json to settings


def model_config(hf_config: HFConfig, heads: Collection[str], *, untied: bool = False) -> ModelConfig:
    """Return our settings for a config.json and the pre-training ``heads`` of its checkpoint.

    ``untied``: the output matrix differs from the embedding, even where tie_word_embeddings is true.
    SettingError if a field is missing or asks for what is not implemented.
    """
    family = family_of(hf_config)
    hf_config = flatten_sections(hf_config, family)
    check_fields(hf_config, family)
    by_alias = {name: hf_config[alias] for alias, name in family.attribute_map.items() if alias in hf_config}
    hf_config = by_alias | hf_config
    settings: Settings = {}
    for field in family.fields:
        for path, value in field.read(hf_config).items():
            if settings.setdefault(path, value) != value:  # two fields of one setting differ
                given = f"{field.names[0]}={hf_config[field.names[0]]!r}"
                raise SettingError(f"config.json: {given} should be {settings[path]!r} here too")
    settings |= _pretraining_head_settings(family, heads)
    if untied and family.tie_flag_unreliable:
        settings["output.logits"] = settings["output.logits"].replace("tied", "separate")
    for path, derive in family.derived.items():
        settings[path] = derive(settings)
    for group in ("attention", "encoder"):
        _set_attention_head_width(settings, group)
    return _replace_settings(family.template, settings)


def _pretraining_head_settings(family: Family, heads: Collection[str]) -> Settings:
    """Return the settings that say which pre-training heads a model has, of those the family knows."""
    known = [name for name, path in HEAD_PARAMETERS.items() if name in heads and path in family.parameters]
    has_output_bias = "logits" in known
    settings: Settings = {
        "heads": [name for name in known if name != "logits"],
        "output.bias": has_output_bias,
    }
    if family.template.architecture == "encoder" and "logits" not in heads:
        settings["output.logits"] = "none"
    if family.has_masked_lm_head:
        settings["output.transform"] = has_output_bias
    return settings


def _set_attention_head_width(settings: Settings, group: str) -> None:
    """Set the width of a group's attention heads to an equal share of d_model, unless a field has set it."""
    num_heads = settings.get(f"{group}.num_heads")
    if num_heads is None or f"{group}.d_kv" in settings:
        return
    settings[f"{group}.d_kv"] = head_width(settings["d_model"], num_heads)


def _replace_settings(template: ModelConfig, settings: Settings) -> ModelConfig:
    """Return ``template`` with the values at these dotted paths replaced; SettingError for a wrong type."""
    nested = asdict(template)
    for path, value in settings.items():
        *groups, name = path.split(".")
        group = nested
        for group_name in groups:
            group = group[group_name]
        group[name] = value
    return from_json(ModelConfig, json.dumps(nested))


# --- from settings to config.json


class _Misfit(NamedTuple):
    """Holds how a model of a family would differ from the one that is to be written."""

    num_differing: int  # settings that differ, those that follow from others included
    has_failed: bool  # whether no such config.json could be written, or read back
    reasons: list[str]


def config_json(config: ModelConfig) -> HFConfig:
    """Return a config.json whose model computes exactly what ``config`` does; SettingError if none does.

    A file that the model was loaded with keeps all fields but those of settings that have changed since.
    """
    expected = semantic_settings(config)
    misfits: dict[str, _Misfit] = {}  # by model_type
    for family, write in _candidates(config):
        try:
            hf_config = write(family, config)
            written = semantic_settings(_read_back(hf_config, config))
        except SettingError as error:
            # one that failed has one reason, however far it is
            count = _count_fixed_misfits(family, expected)
            misfits[family.model_type] = _Misfit(count, True, [str(error)])
            continue
        differing = [path for path, value in expected.items() if value != written.get(path)]
        if not differing:
            return hf_config
        # A setting that the family does not read follows from another: rotary.base from positions.kind.
        named = [path for path in differing if path in written] or differing
        reasons = [f"model.{path}={expected[path]!r} should be {written.get(path)!r}" for path in named]
        misfits[family.model_type] = _Misfit(len(differing), False, reasons)

    def distance(name: str) -> tuple[bool, int, bool]:
        differs = FAMILIES[name].template.architecture != config.architecture
        return differs, misfits[name].num_differing, misfits[name].has_failed

    nearest_type = min(misfits, key=distance)
    reasons = misfits[nearest_type].reasons
    raise SettingError(f"no published family computes this model; for {nearest_type}, {', '.join(reasons)}")


def _count_fixed_misfits(family: Family, expected: Settings) -> int:
    """Return how many ``expected`` settings differ, of those that all models of the family share."""
    varying = {path for field in family.fields for path in field.settings} | family.derived.keys() | VARYING
    fixed = semantic_settings(family.template)
    return sum(value != fixed.get(path) for path, value in expected.items() if path not in varying)


def _candidates(config: ModelConfig) -> Iterator[tuple[Family, Callable[[Family, ModelConfig], HFConfig]]]:
    """Yield families that may compute a model, each with a function that writes its config.json.

    First comes the one that the model was loaded from.
    """
    if config.published:
        source = family_of(json.loads(config.published))
        yield source, _update_published
        yield source, _write_new
    for family in FAMILIES.values():
        yield family, _write_new


def _read_back(hf_config: HFConfig, config: ModelConfig) -> ModelConfig:
    """Return the settings of a config.json, for a model that has the heads and matrices of ``config``."""
    untied = config.output.logits.startswith("separate")
    return model_config(hf_config, pretraining_heads_of_config(config), untied=untied)


def _update_published(family: Family, config: ModelConfig) -> HFConfig:
    """Return the config.json that a model was loaded with, with the settings that have changed since."""
    published = json.loads(config.published)
    before = _read_back(published, config)
    hf_config = flatten_sections(published, family)
    for field in family.fields:
        if any(attrgetter(path)(config) != attrgetter(path)(before) for path in field.settings):
            for name in field.superseded:
                hf_config.pop(name, None)
            hf_config |= field.write(config)
    hf_config |= family.written_values
    if not pretraining_heads_of_config(config).issuperset(pretraining_heads_of_checkpoint(published, ())):
        hf_config["architectures"] = _first_class(family, config)
    # Weights are written in float32.
    dtypes = [name for name in hf_config if name.rpartition(".")[2] in ("dtype", "torch_dtype")]
    return nest_sections(hf_config | dict.fromkeys(dtypes, "float32"), family)


def _write_new(family: Family, config: ModelConfig) -> HFConfig:
    """Return a new config.json of a family."""
    hf_config: HFConfig = {
        "model_type": family.model_type,
        "architectures": _first_class(family, config),
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    hf_config |= {name: value for name, value in family.supported_values.items() if value is not None}
    for field in family.fields:
        hf_config |= field.write(config)
    return nest_sections(hf_config | dict(family.written_values), family)


def _first_class(family: Family, config: ModelConfig) -> list[str]:
    """Return the first class of a family all of whose pre-training heads a model has; empty if none is."""
    heads = pretraining_heads_of_config(config)
    return [name for name, needed in family.architectures.items() if heads.issuperset(needed)][:1]


# Settings without effect on the outputs, or only on those of a new model or in training.
_NON_SEMANTIC = (
    "published",
    "special.",
    "dropout",
    "dtype",
    "compile.",
    "positions.relative_bias_start",
    "cross_attention.start",
    *(f"experts.{name}" for name in ("balance_loss", "z_loss", "exploration", "noise", "dropout")),
)


def semantic_settings(config: ModelConfig) -> Settings:
    """Return the settings that the outputs of a trained model depend on.

    Configs with equal settings here compute the same function, given the same parameters; ``config_json``
    relies on it. Settings that another setting switches off are left out.
    """
    usual_scale = replace(config.attention, scale=None).product_scale
    settings = dict(leaves(config)) | {
        "attention.num_key_value_heads": config.attention.key_value_heads,
        "attention.d_v": config.attention.value_width,
        "attention.query_pre_attn_scalar": config.attention.query_pre_attn_scalar or config.attention.d_kv,
        "attention.scale": None if config.attention.product_scale == usual_scale else config.attention.scale,
        "positions.rotary.window_base": config.positions.rotary.for_window_layers().base,
        "mlp.bias": config.mlp_has_bias,
        "attention.qkv_bias": config.qkv_has_bias,
        "attention.key_bias": config.key_has_bias,
        "heads": tuple(sorted(config.heads)),
        "experts.first": config.experts.first_layer,
        "experts.d_ff": config.expert_d_ff,
    }
    has_window = config.has_window("encoder") or config.has_window("decoder")
    # settings -> whether the model reads them; those that end in "." or "_" are beginnings of several
    conditions = {
        ("num_encoder_layers",): config.has_encoder,
        ("num_decoder_layers",): config.has_decoder,
        ("positions.max_length", "positions.offset"): config.positions.is_learned,
        ("positions.sinusoid",): config.positions.kind == "sinusoidal",
        ("positions.relative_",): config.positions.kind.startswith("relative"),
        DISENTANGLED_SETTINGS: config.positions.kind == "relative-disentangled",
        ("positions.relative_buckets", "positions.relative_max_distance"): config.positions.has_buckets,
        ("positions.relative_types",): config.positions.kind == "relative-sinusoids",
        ("positions.rotary.",): config.positions.kind == "rotary",
        ("embedding.projected",): bool(config.embedding.d_embed),
        ("embedding.convolution_activation",): config.embedding.convolution > 0,
        ("attention.norm_scale",): config.attention.has_head_norms,
        ("attention.scale",): config.attention.scores != "dot",
        ("attention.qk_norm_features",): config.attention.qk_norm,
        ("positions.rotary.window_base",): has_window,
        ("positions.rotary.window_scaling",): has_window and config.positions.rotary.scaling != "none",
        ("norm.bias",): config.norm.kind == "layer",
        ("output.logit_cap", "output.logit_divisor"): config.output.logits != "none",
        ("experts.",): config.experts.count > 0,
        ("experts.normalized",): config.experts.per_token > 1,
        # Token choice reads capacity_factor in training only; expert choice also in evaluation, unless
        # eval_capacity_factor is set. Only token choice reads eval_capacity.
        ("experts.capacity_factor",): config.experts.kind == "expert-choice",
        ("experts.eval_capacity",): config.experts.kind == "token-choice",
        ("experts.group_rows",): config.experts.factor(is_training=False) is not None,
    }
    unread = [start for starts, is_read in conditions.items() if not is_read for start in starts]
    unread += [f"positions.rotary.{name}" for name in unused_rope_settings(config.positions.rotary.scaling)]
    left_out = {*_NON_SEMANTIC, *unread}
    beginnings = tuple(name for name in left_out if name.endswith((".", "_")))
    return {
        path: value
        for path, value in settings.items()
        if path not in left_out and not path.startswith(beginnings)
    }
