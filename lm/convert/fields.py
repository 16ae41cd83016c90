"""Fields of config.json that several families share, and those whose values are converted."""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf, nextafter
from operator import attrgetter
from typing import Any

from lm.config.base import SettingError, did_you_mean
from lm.config.experts import ExpertsConfig
from lm.config.model import ModelConfig
from lm.convert.schema import REQUIRED, Field, FieldGroup, HFConfig, Settings


def check_boolean(name: str, value: Any) -> None:
    """Raise SettingError if a field is neither true nor false."""
    if not isinstance(value, bool):
        raise SettingError(f"config.json: {name}={value!r} should be true or false")


def choice(name: str, setting: str, choices: Mapping[Any, Any], default: Any = REQUIRED) -> Field:
    """Map a field whose values are the keys of ``choices``, and its setting, whose values they hold.

    Of several keys with the same value, the first is written.
    """

    def to_setting(value: Any, _: HFConfig) -> Any:
        if value not in choices:
            near = did_you_mean(str(value), map(str, choices))
            raise SettingError(f"config.json: {name}={value!r} is not supported{near}")
        return choices[value]

    def to_field(setting_value: Any, _: ModelConfig) -> Any:
        for value, meaning in choices.items():
            if meaning == setting_value:
                return value
        return next(iter(choices))  # a wrong value, which ``config_json`` notices when it reads it again

    return Field(name, setting, default, to_setting, to_field)


# GELU is that of the error function in BERT and GPT-NeoX, its tanh form in GPT-2, ALBERT, BLOOM and T5 1.1.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATED_ACTIVATIONS = {
    "silu": "gated-silu",
    "relu": "gated-relu",
    "gelu_new": "gated-gelu",  # our gated GELU is the tanh form
    "gelu_pytorch_tanh": "gated-gelu",
    "gelu": "gated-gelu-erf",
    "swish": "gated-silu",
}


def activation(name: str, default: str) -> Field:
    """Map the activation of the feed-forward layer."""
    return choice(name, "mlp.activation", ACTIVATIONS, default)


def tied_embeddings(default: bool) -> Field:
    """Map whether the output matrix is the embedding."""
    return choice("tie_word_embeddings", "output.logits", {True: "tied", False: "separate"}, default)


def pad_token(default: int) -> Field:
    """Map the id of padding; null, where nothing was padded, is read as 0."""
    return Field("pad_token_id", "special.pad", default, lambda value, _: value or 0)


def eos_token(default: int | None) -> Field:
    """Map the id that ends a text: the first of several, since the others end turns of a conversation."""

    def first(value: Any, _: HFConfig) -> Any:
        if isinstance(value, list):
            return value[0] if value else None
        return value

    return Field("eos_token_id", "special.eos", default, first)


def bos_token() -> FieldGroup:
    """Write the id that begins a decoder's text, without which transformers begins one with its own default.

    It is not read into a setting: what the tokenizer puts before a text comes first (lm.special_tokens).
    """

    def write(config: ModelConfig) -> HFConfig:
        return {"bos_token_id": config.special.start}

    return FieldGroup(("bos_token_id",), ("special.start",), lambda _: {}, write)


def feed_forward_width(name: str, width: str) -> Field:
    """Map the width of the feed-forward layer, by default four times the field ``width``."""
    return Field(name, "mlp.d_ff", None, lambda value, hf_config: value or 4 * hf_config[width])


def head_width(width: int, num_heads: int) -> int:
    """Return the width of each of the heads that share a width; SettingError if they cannot share it."""
    if num_heads < 1 or width % num_heads:
        raise SettingError(f"{num_heads} heads should divide a width of {width}")
    return width // num_heads


def key_value_heads(default: int | None = None) -> Field:
    """Map the number of key and value heads; None: that of query heads."""
    return Field(
        "num_key_value_heads",
        "attention.num_key_value_heads",
        default,
        to_field=lambda _, config: config.attention.key_value_heads,
    )


def none_if_equal(other: str, default: Any = None) -> Callable[[Any, HFConfig], Any]:
    """Return a conversion of a value that equals the field ``other`` to None, which means the same size."""

    def to_setting(value: Any, hf_config: HFConfig) -> Any:
        other_value = hf_config.get(other, default)
        # False == 0, but not in a config.json
        is_equal = value == other_value and type(value) is type(other_value)
        return None if is_equal else value

    return to_setting


def encoder_size(name: str, setting: str, decoder_field: str) -> Field:
    """Map a size of the encoder's blocks, None where the decoder's ``decoder_field`` is the same."""
    return Field(
        name,
        f"encoder.{setting.rpartition('.')[2]}",
        to_setting=none_if_equal(decoder_field),
        to_field=lambda value, config: value or attrgetter(setting)(config),
    )


def embedding_width(name: str, default: int | None, to_setting: Callable[[Any, HFConfig], Any]) -> Field:
    """Map the width of the embedding before it is projected to that of the blocks."""
    return Field(name, "embedding.d_embed", default, to_setting, lambda _, config: config.embed_width)


def opt_embedding_width() -> Field:
    """Map the width of OPT's embedding, which a tied output matrix shares.

    A matrix of its own would be as wide in transformers, behind a projection that ours lacks.
    """
    name, tied = "word_embed_proj_dim", "tie_word_embeddings"
    if_other = none_if_equal("hidden_size")

    def to_setting(value: Any, hf_config: HFConfig) -> int | None:
        width = if_other(value, hf_config)
        if width is not None and hf_config.get(tied, True) is False:
            raise SettingError(
                f"config.json: {name}={value!r} with {tied}=False is not supported: {name} should be "
                f"hidden_size={hf_config['hidden_size']!r}, or {tied} true"
            )
        return width

    return embedding_width(name, None, to_setting)


# the number whose root divides the products of queries and keys; None: the width of a head
QUERY_SCALAR = Field(
    "query_pre_attn_scalar",
    "attention.query_pre_attn_scalar",
    256,
    none_if_equal("head_dim", 256),
    lambda value, config: value or config.attention.d_kv,
)


SIDES = ("encoder", "decoder")


def same_in_both(field: Field | FieldGroup) -> FieldGroup:
    """Map a field of each stack's section, which is supported where it means the same in both."""

    def in_sections(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{side}.{name}" for side in SIDES for name in names)

    def read(hf_config: HFConfig) -> Settings:
        encoder, decoder = (field.read(_section(hf_config, side)) for side in SIDES)
        if encoder != decoder:
            given = [name for name in in_sections(field.names) if name in hf_config]
            values = " and ".join(f"{name}={hf_config[name]!r}" for name in given)
            raise SettingError(f"config.json: {values} are not supported: they should be the same")
        return decoder

    def write(config: ModelConfig) -> HFConfig:
        by_side = {"encoder": field.write(config.encoder_config), "decoder": field.write(config)}
        return {f"{side}.{name}": value for side in SIDES for name, value in by_side[side].items()}

    names, superseded = in_sections(field.names), in_sections(field.superseded)
    return FieldGroup(names, field.settings, read, write, superseded)


def _section(hf_config: HFConfig, side: str) -> HFConfig:
    """Return the fields of a stack, by their names in its section."""
    start = f"{side}."
    return {name.removeprefix(start): value for name, value in hf_config.items() if name.startswith(start)}


# RoBERTa numbers positions from the id of padding plus one; the rows before them are unused.
POSITIONS_AFTER_PADDING = Field(
    "max_position_embeddings",
    "positions.max_length",
    to_setting=lambda value, hf_config: value - (hf_config.get("pad_token_id", 1) or 0) - 1,
    to_field=lambda value, config: value + config.positions.offset,
)


def falcon_architecture() -> FieldGroup:
    """Map the fields from which the heads of keys and the norms of Falcon's blocks follow.

    The new architecture (40B) has num_kv_heads heads of keys, and one or two norms of a block's input. The
    old one has a single head of keys (7B) or one per query head, and one norm or, without parallel_attn, a
    norm before each sub-layer.
    """
    new, multi_query, parallel = "new_decoder_architecture", "multi_query", "parallel_attn"
    kv_heads, num_norms = "num_kv_heads", "num_ln_in_parallel_attn"

    def flag(hf_config: HFConfig, name: str, default: bool) -> bool:
        value = default if hf_config.get(name) is None else hf_config[name]
        check_boolean(name, value)
        return value

    def read(hf_config: HFConfig) -> Settings:
        is_new = flag(hf_config, new, False)
        is_multi_query = flag(hf_config, multi_query, True)
        is_parallel = flag(hf_config, parallel, True)
        norms = hf_config.get(num_norms) or (2 if is_new else 1)
        if norms not in (1, 2) or (norms == 2 and not is_new) or (is_new and not is_parallel):
            given = ", ".join(f"{name}={hf_config.get(name)!r}" for name in (new, parallel, num_norms))
            raise SettingError(f"config.json: {given} are not supported together")
        if norms == 2:
            residual = "parallel"
        else:
            residual = "parallel-one-norm" if is_parallel else "pre-norm"
        heads = 1 if is_multi_query else None  # None: as many as those of queries
        if is_new:
            heads = hf_config.get(kv_heads)
            if heads == hf_config["num_attention_heads"]:
                heads = None
        return {"residual": residual, "attention.num_key_value_heads": heads}

    def write(config: ModelConfig) -> HFConfig:
        heads = config.attention.key_value_heads
        is_grouped = heads not in (1, config.attention.num_heads)
        is_new = config.residual == "parallel" or is_grouped
        fields: HFConfig = {
            new: is_new,
            multi_query: heads == 1,
            kv_heads: heads,
            parallel: config.residual != "pre-norm",
        }
        if is_new:
            fields[num_norms] = 2 if config.residual == "parallel" else 1
        return fields

    settings = ("residual", "attention.num_key_value_heads")
    return FieldGroup((new, multi_query, kv_heads, parallel, num_norms), settings, read, write)


def bloom_parts() -> FieldGroup:
    """Check that the products of BLOOM's output layers are not computed in parts.

    With both fields transformers adds up parts of each product, and leaves the bias out.
    """
    number, is_used = "pretraining_tp", "slow_but_exact"

    def read(hf_config: HFConfig) -> Settings:
        if hf_config.get(is_used) and (hf_config.get(number) or 1) > 1:
            given = f"{is_used}={hf_config[is_used]!r} with {number}={hf_config[number]!r}"
            raise SettingError(
                f"config.json: {given} is not supported, since transformers then leaves out biases: "
                f"{is_used} should be false"
            )
        return {}

    return FieldGroup((number, is_used), (), read, lambda _: {})


# --- T5


def _t5_max_distance(value: Any, hf_config: HFConfig) -> int:
    """Return the distance from which on positions share a bucket.

    The first half of the buckets hold one distance each. SettingError if they hold this one: transformers
    then assigns the other buckets out of order.
    """
    exact_buckets = hf_config["relative_attention_num_buckets"] // 2
    if value <= exact_buckets:
        raise SettingError(
            f"config.json: relative_attention_max_distance={value} should be more than half of "
            f"relative_attention_num_buckets, {exact_buckets}"
        )
    return value


T5_MAX_DISTANCE = Field(
    "relative_attention_max_distance", "positions.relative_max_distance", 128, _t5_max_distance
)


def t5_activation(default: str = "relu") -> FieldGroup:
    """Map feed_forward_proj, and the two fields in which files of transformers repeat what it says."""
    kinds = ("relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "silu")
    feed_forward = choice("feed_forward_proj", "mlp.activation", {kind: kind for kind in kinds}, default)

    def repeated(kind: str) -> HFConfig:
        # gated-gelu of T5 1.1 is the tanh form; plain gelu is that of the error function.
        activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        return {"is_gated_act": kind.startswith("gated-"), "dense_act_fn": activation}

    def read(hf_config: HFConfig) -> Settings:
        settings = feed_forward.read(hf_config)
        for name, expected in repeated(settings["mlp.activation"]).items():
            if hf_config.get(name, expected) != expected:
                raise SettingError(
                    f"config.json: {name}={hf_config[name]!r} contradicts "
                    f"feed_forward_proj={settings['mlp.activation']!r}"
                )
        return settings

    def write(config: ModelConfig) -> HFConfig:
        field = feed_forward.write(config)
        return field | repeated(field["feed_forward_proj"])

    return FieldGroup(("feed_forward_proj", "is_gated_act", "dense_act_fn"), ("mlp.activation",), read, write)


def t5_logits() -> FieldGroup:
    """Map whether the output matrix is the embedding, and whether its inputs are scaled by d_model^-0.5.

    Before transformers 5 a file had tie_word_embeddings alone: models that tie the two (T5 1.0) scaled the
    states, others (1.1) did not. Since then scale_decoder_outputs says whether they are scaled, and only the
    tensors show whether the output matrix is another than the embedding.
    """
    names = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(hf_config: HFConfig) -> Settings:
        tied = hf_config.get(names[0], True)
        scaled = hf_config.get(names[1], tied)
        for name, value in zip(names, (tied, scaled), strict=True):
            check_boolean(name, value)
        matrix = "tied" if tied else "separate"
        return {"output.logits": f"{matrix}-scaled" if scaled else matrix}

    def write(config: ModelConfig) -> HFConfig:
        # Both are true of a separate matrix whose states are scaled.
        return {
            names[0]: config.output.logits != "separate",
            names[1]: config.output.logits.endswith("scaled"),
        }

    return FieldGroup(names, ("output.logits",), read, write)


# --- Switch Transformers


def switch_layers() -> FieldGroup:
    """Map which layers have experts: the second of each stack, and every step-th after it.

    The step of a stack is the number of its layers divided by how many should have experts, rounded down, and
    files hold both. With a step of 1 all layers have experts. Without any layer that should have them, the
    step is the number of layers, so that the second layer has them all the same.
    """
    layers = {"encoder": "num_layers", "decoder": "num_decoder_layers"}
    sparse = {side: f"num_sparse_{side}_layers" for side in SIDES}
    steps = {side: f"{side}_sparse_step" for side in SIDES}

    def with_experts(step: int, num_layers: int) -> tuple[int, ...]:
        return ExpertsConfig(count=1, every=step, first=0 if step == 1 else 1).layers(num_layers)

    def read(hf_config: HFConfig) -> Settings:
        by_side = {}
        for side in SIDES:
            num_layers = hf_config.get(layers[side]) or hf_config["num_layers"]
            num_sparse = hf_config.get(sparse[side], 3)
            default_step = num_layers // num_sparse if num_sparse > 0 else num_layers
            step = hf_config.get(steps[side], default_step)
            if not isinstance(step, int) or step < 1:
                raise SettingError(f"config.json: {steps[side]}={step!r} should be a number from 1 on")
            by_side[side] = step, num_layers
        # Of several steps that mean the same in short stacks, the least.
        for every in range(1, max(step for step, _ in by_side.values()) + 1):
            if all(
                with_experts(every, count) == with_experts(step, count) for step, count in by_side.values()
            ):
                return {"experts.every": every, "experts.first": 1 if every > 2 else None}
        names = " and ".join(f"{steps[side]}={step}" for side, (step, _) in by_side.items())
        raise SettingError(f"config.json: {names} are not supported: they should be the same")

    def write(config: ModelConfig) -> HFConfig:
        every = config.experts.every
        counts = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
        sparse_layers = {sparse[side]: max(counts[side] // every, 1) for side in SIDES}
        return sparse_layers | {steps[side]: every for side in SIDES}

    names = (*layers.values(), *sparse.values(), *steps.values())
    return FieldGroup(names, ("experts.every", "experts.first"), read, write)


UNLIMITED = 2**20  # a capacity that no text reaches [tokens]


def switch_capacity() -> Field:
    """Map how many tokens of a text an expert reads in evaluation."""
    return Field(
        "expert_capacity",
        "experts.eval_capacity",
        64,
        lambda value, _: value if value < UNLIMITED else None,
        lambda value, _: value or UNLIMITED,
    )


def switch_jitter() -> FieldGroup:
    """Map the noise by which a router tries other experts in training."""
    name = "router_jitter_noise"

    def read(hf_config: HFConfig) -> Settings:
        noise = float(hf_config.get(name, 0.01))
        return {"experts.exploration": "jitter", "experts.noise": noise} if noise else {}

    def write(config: ModelConfig) -> HFConfig:
        return {name: config.experts.noise if config.experts.exploration == "jitter" else 0.0}

    return FieldGroup((name,), ("experts.exploration", "experts.noise"), read, write)


# --- XLNet


def xlnet_head_width() -> Field:
    """Map the width of heads, which share the width of the model, whether a file says so or leaves it out."""

    def to_setting(value: Any, hf_config: HFConfig) -> int:
        width, heads = hf_config["d_model"], hf_config["n_head"]
        head_width = width // heads if value is None else value
        if head_width * heads != width:
            raise SettingError(
                f"config.json: d_head={value!r} is not supported: n_head={heads!r} heads should share "
                f"d_model={width!r}"
            )
        return head_width

    return Field("d_head", "attention.d_kv", None, to_setting)


# --- DeBERTa

DISENTANGLED_SETTINGS = tuple(f"positions.relative_{name}" for name in ("products", "projections", "norm"))
_PRODUCTS = {
    "both": ["p2c", "c2p"],
    "content-to-position": ["c2p"],
    "position-to-content": ["p2c"],
}


def _words(value: Any) -> list[str]:
    """Return the words of a field, in order: of a list, or of a string in which | stands between them."""
    words = value.split("|") if isinstance(value, str) else value or []
    return sorted(str(word).strip().lower() for word in words)


def deberta_products() -> Field:
    """Map which products with relative positions are added to a score."""

    def to_setting(value: Any, _: HFConfig) -> str:
        for products, words in _PRODUCTS.items():
            if _words(value) == sorted(words):
                return products
        raise SettingError(
            f"config.json: pos_att_type={value!r} is not supported: it should be c2p, p2c or both"
        )

    return Field(
        "pos_att_type", "positions.relative_products", None, to_setting, lambda value, _: _PRODUCTS[value]
    )


def deberta_norm() -> Field:
    """Map whether the embeddings of relative positions are normalised."""

    def to_setting(value: Any, _: HFConfig) -> bool:
        if _words(value) not in (["layer_norm"], ["none"]):
            raise SettingError(
                f"config.json: norm_rel_ebd={value!r} is not supported: it should be 'layer_norm' or 'none'"
            )
        return _words(value) == ["layer_norm"]

    return Field(
        "norm_rel_ebd",
        "positions.relative_norm",
        "none",
        to_setting,
        lambda value, _: "layer_norm" if value else "none",
    )


def deberta_distances(*, has_buckets: bool) -> FieldGroup:
    """Map the buckets of relative positions, and check that positions are relative alone.

    Without buckets, as in all models of version 1, each distance has an embedding, up to
    max_relative_positions, or if that is below 1 up to max_position_embeddings.
    """
    names = ("relative_attention", "position_biased_input")
    longest, buckets, distance = "max_position_embeddings", "position_buckets", "max_relative_positions"

    def read(hf_config: HFConfig) -> Settings:
        for name, default, supported in zip(names, (False, True), (True, False), strict=True):
            if (value := hf_config.get(name, default)) is not supported:
                raise SettingError(f"config.json: {name}={value!r} is not supported, only {supported!r}")
        max_length = hf_config.get(longest, 512)
        max_distance = hf_config.get(distance, -1)
        max_distance = max_distance if max_distance > 0 else max_length
        per_side = hf_config.get(buckets, -1) if has_buckets else -1
        if per_side > 0 and (per_side < 4 or per_side % 2 or per_side >= max_distance):
            raise SettingError(
                f"config.json: {buckets}={per_side!r} is not supported with a {distance} of {max_distance}: "
                "it should be an even number from 4 on, and less"
            )
        return {
            "positions.max_length": max_length,
            "positions.relative_max_distance": max_distance,
            "positions.relative_buckets": 2 * (per_side if per_side > 0 else max_distance),
        }

    def write(config: ModelConfig) -> HFConfig:
        positions = config.positions
        has_bucket_per_distance = positions.relative_buckets == 2 * positions.relative_max_distance
        written = {
            names[0]: True,
            names[1]: False,
            longest: positions.max_length,
            distance: positions.relative_max_distance,
        }
        if has_buckets:
            written[buckets] = -1 if has_bucket_per_distance else positions.relative_buckets // 2
        return written

    settings = ("max_length", "relative_max_distance", "relative_buckets")
    own = (*names, longest, distance, *([buckets] if has_buckets else []))
    return FieldGroup(own, tuple(f"positions.{name}" for name in settings), read, write)


def deberta_head_width() -> FieldGroup:
    """Check that heads share the width of the model, whether a file says so or leaves it out."""
    name = "attention_head_size"

    def read(hf_config: HFConfig) -> Settings:
        width, heads = hf_config.get(name), hf_config["num_attention_heads"]
        if width is not None and width * heads != hf_config["hidden_size"]:
            raise SettingError(
                f"config.json: {name}={width!r} is not supported: {heads} heads should share hidden_size="
                f"{hf_config['hidden_size']!r}"
            )
        return {}

    return FieldGroup((name,), (), read, lambda _: {})


def deberta_convolution() -> FieldGroup:
    """Map the convolution beside the first layer, which models of version 2 have and those of 3 have not."""
    name, act, groups = "conv_kernel_size", "conv_act", "conv_groups"
    settings = ("embedding.convolution", "embedding.convolution_activation")

    def read(hf_config: HFConfig) -> Settings:
        size = hf_config.get(name) or 0
        if size <= 0:
            return {settings[0]: 0}
        if size % 2 == 0:
            raise SettingError(f"config.json: {name}={size!r} is not supported: it should be odd")
        if hf_config.get(groups, 1) != 1:
            raise SettingError(f"config.json: {groups}={hf_config[groups]!r} is not supported, only 1")
        activation = hf_config.get(act, "tanh")
        if activation not in ("gelu", "tanh"):
            raise SettingError(
                f"config.json: {act}={activation!r} is not supported: it should be 'gelu' or 'tanh'"
            )
        return {settings[0]: size, settings[1]: activation}

    def write(config: ModelConfig) -> HFConfig:
        size = config.embedding.convolution
        return {name: size} | ({act: config.embedding.convolution_activation, groups: 1} if size else {})

    return FieldGroup((name, act, groups), settings, read, write)


# --- rotary positions


def rotated_features() -> Field:
    """Map rotary_dim, how many features of a head GPT-J rotates.

    Without a number the code of transformers makes angles for the width of the model, which fit no heads.
    """
    name = "rotary_dim"

    def to_setting(value: Any, hf_config: HFConfig) -> float:
        if type(value) is not int or value < 1:
            raise SettingError(f"config.json: {name}={value!r} should be a number of features from 1 on")
        width = head_width(hf_config["n_embd"], hf_config["n_head"])
        fraction = value / width
        # Rounding may leave the product, of which the whole features count, below the number: 30 / 44 * 44.
        return fraction if int(fraction * width) == value else nextafter(fraction, inf)

    return Field(name, "positions.rotary.fraction", 64, to_setting, lambda _, config: config.rotary_width)


def modernbert_rope() -> FieldGroup:
    """Map the bases of rotary positions in layers without a window and with one.

    Version 5 of transformers has a single field, rope_parameters, but also reads the two of version 4, which
    are written here. In these a null base of windows means that of the other layers.
    """
    theta, window_theta = "global_rope_theta", "local_rope_theta"

    def read(hf_config: HFConfig) -> Settings:
        if hf_config.get("rope_scaling") is not None:
            raise SettingError(f"config.json: rope_scaling={hf_config['rope_scaling']!r} is not supported")
        by_type = _rope_by_type(hf_config)
        base = _base_alone("full_attention", by_type, hf_config.get(theta, 160_000.0))
        window_base = _base_alone("sliding_attention", by_type, hf_config.get(window_theta, 10_000.0))
        return {
            "positions.rotary.base": base,
            "positions.rotary.window_base": None if window_base == base else window_base,
        }

    def write(config: ModelConfig) -> HFConfig:
        rotary = config.positions.rotary
        return {theta: rotary.base, window_theta: rotary.for_window_layers().base}

    names = (theta, window_theta, "rope_parameters", "rope_scaling")
    settings = ("positions.rotary.base", "positions.rotary.window_base")
    return FieldGroup(names, settings, read, write, superseded=("rope_parameters",))


def gemma3_rope() -> FieldGroup:
    """Map rotary positions whose layers with a window have a base of their own and are never stretched.

    The other layers may be. Version 5 of transformers has a single field, rope_parameters, but also reads the
    three of version 4, which are written here.
    """
    window_theta = "rope_local_base_freq"
    of_full_layers = rope_fields(types=("default", "linear", "llama3"), default_base=1e6)

    def read(hf_config: HFConfig) -> Settings:
        by_type = _rope_by_type(hf_config)
        settings = of_full_layers.read(hf_config | {"rope_parameters": by_type.get("full_attention")})
        window_base = _base_alone("sliding_attention", by_type, hf_config.get(window_theta, 10_000.0))
        is_same = window_base == settings["positions.rotary.base"]
        is_stretched = settings["positions.rotary.scaling"] != "none"
        return settings | {
            "positions.rotary.window_base": None if is_same else window_base,
            "positions.rotary.window_scaling": "none" if is_stretched else "same",
        }

    def write(config: ModelConfig) -> HFConfig:
        window_base = config.positions.rotary.for_window_layers().base
        return of_full_layers.write(config) | {window_theta: window_base}

    settings = ("positions.rotary.window_base", "positions.rotary.window_scaling")
    return FieldGroup(
        (*of_full_layers.names, window_theta),
        (*of_full_layers.settings, *settings),
        read,
        write,
        superseded=of_full_layers.superseded,
    )


def _rope_by_type(hf_config: HFConfig) -> HFConfig:
    """Return rope_parameters, by type of layer; SettingError for what is given outside of the two types."""
    by_type = hf_config.get("rope_parameters") or {}
    types = ("full_attention", "sliding_attention")
    if others := sorted(by_type.keys() - {*types}):
        raise SettingError(
            f"config.json: rope_parameters has {others}: it should have parameters of each of {types} alone"
        )
    return by_type


def _base_alone(layer_type: str, by_type: Mapping[str, Any], default: float | None) -> float | None:
    """Return the rotary base of layers of a type; SettingError if their positions are stretched too."""
    parameters = {"rope_theta": default} | (by_type.get(layer_type) or {})
    base = parameters.pop("rope_theta")
    rope_type = parameters.pop("rope_type", "default")
    others = {name: value for name, value in parameters.items() if value is not None}
    if rope_type != "default" or others:
        given = {"rope_type": rope_type} | others
        raise SettingError(
            f"config.json: rope_parameters of {layer_type}={given} are not supported, only rope_theta"
        )
    return base


ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
ORIGINAL_LENGTH = "original_max_position_embeddings"  # by default max_position_embeddings
# field of rope_scaling -> (setting, the scalings that read it)
ROPE_SCALING_FIELDS = {
    "factor": ("factor", ("linear", "llama3", "yarn")),
    ORIGINAL_LENGTH: ("original_length", ("llama3", "yarn")),
    "low_freq_factor": ("low_frequency_factor", ("llama3",)),
    "high_freq_factor": ("high_frequency_factor", ("llama3",)),
    "beta_fast": ("beta_fast", ("yarn",)),
    "beta_slow": ("beta_slow", ("yarn",)),
}


def unused_rope_settings(scaling: str) -> tuple[str, ...]:
    """Return the settings of rotary positions that a scaling does not read."""
    return tuple(setting for setting, scalings in ROPE_SCALING_FIELDS.values() if scaling not in scalings)


# rope_type -> the fields of rope_scaling that have no default
NEEDED_OF_ROPE = {
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL_LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
}


def _with_rope_type(values: HFConfig | None) -> HFConfig:
    """Return the values of a field of rotary positions, in the newer of two spellings of their type."""
    values = dict(values or {})
    older = values.pop("type", None)
    return values if older is None else {"rope_type": older} | values


def rope_fields(
    theta: str = "rope_theta",
    fraction: str | None = None,
    default_fraction: float = 1.0,
    types: Collection[str] = tuple(ROPE_TYPES),
    default_base: float = 10_000.0,
) -> FieldGroup:
    """Map rotary positions, as transformers 4 spells them (``theta``, ``fraction``, rope_scaling) and 5.

    Version 5 has a single field, rope_parameters, but also reads the older spelling, which is written here.
    Without ``fraction`` the family rotates all features of a head. ``types`` are those that the family knows.
    """

    def read(hf_config: HFConfig) -> Settings:
        values = {
            "rope_theta": hf_config.get("rope_theta", hf_config.get(theta, default_base)),
            "partial_rotary_factor": hf_config.get(
                "partial_rotary_factor", hf_config.get(fraction or "", default_fraction)
            ),
        }
        parameters = _with_rope_type(hf_config.get("rope_parameters"))
        scaling = _with_rope_type(hf_config.get("rope_scaling"))
        if parameters and any(parameters.get(name, value) != value for name, value in scaling.items()):
            raise SettingError(
                "config.json: rope_parameters and rope_scaling contradict each other: keep one"
            )
        values |= parameters | scaling
        rope_type = values.pop("rope_type", "default")
        if rope_type not in types:
            near = did_you_mean(str(rope_type), types)
            raise SettingError(f"config.json: rope_type={rope_type!r} is not supported{near}")
        if rope_type != "default" and values.get(ORIGINAL_LENGTH) is None:
            values[ORIGINAL_LENGTH] = hf_config.get("max_position_embeddings")
        for name in NEEDED_OF_ROPE.get(str(rope_type), ()):
            if values.get(name) is None:
                raise SettingError(f"config.json: rope_type={rope_type!r} needs {name}")
        base, rotated_fraction = values.pop("rope_theta"), values.pop("partial_rotary_factor")
        if fraction is None and rotated_fraction != default_fraction:
            given = f"partial_rotary_factor={rotated_fraction!r}"
            raise SettingError(f"config.json: {given} is not supported, only {default_fraction}")
        settings = {
            "positions.rotary.base": base,
            "positions.rotary.fraction": rotated_fraction,
            "positions.rotary.scaling": ROPE_TYPES[str(rope_type)],
        }
        for name, value in values.items():
            if value is None or (name, value) == ("truncate", True):
                continue
            if name not in ROPE_SCALING_FIELDS:
                raise SettingError(f"config.json: {name}={value!r} of rotary positions is not supported")
            settings[f"positions.rotary.{ROPE_SCALING_FIELDS[name][0]}"] = value
        return settings

    def write(config: ModelConfig) -> HFConfig:
        rotary = config.positions.rotary
        hf_config: HFConfig = {theta: rotary.base, "rope_scaling": None}
        if fraction is not None:
            hf_config[fraction] = rotary.fraction
        if rotary.scaling != "none":
            unused = unused_rope_settings(rotary.scaling)
            hf_config["rope_scaling"] = {"rope_type": rotary.scaling} | {
                name: getattr(rotary, setting)
                for name, (setting, _) in ROPE_SCALING_FIELDS.items()
                if setting not in unused
            }
        return hf_config

    names = ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters")
    own_names = tuple(name for name in (theta, fraction) if name is not None)
    settings = ("base", "fraction", "scaling", *(setting for setting, _ in ROPE_SCALING_FIELDS.values()))
    return FieldGroup(
        tuple(dict.fromkeys((*names, "max_position_embeddings", *own_names))),
        tuple(f"positions.rotary.{setting}" for setting in settings),
        read,
        write,
        superseded=("rope_parameters",),
    )
