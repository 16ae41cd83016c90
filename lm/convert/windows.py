"""Fields of config.json that say how far each layer's self-attention sees.

A published window counts the position's own token, those of Longformer and ModernBERT count both sides, and
that of T5Gemma's encoder counts one side. Ours count the tokens before the position; None: the layer sees
everything.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lm.config.attention import widest_window
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.convert.fields import SIDES, check_boolean
from lm.convert.schema import FieldGroup, HFConfig, Settings

Window = int | None
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers in most families
MAX_LAYERS = 10_000  # for which a list of windows is made
SETTINGS = ("sparsity.window", "sparsity.layer_windows")  # that hold the windows


def _window_fields(
    read_windows: Callable[[HFConfig], Sequence[Window]], **write: Callable[[ModelConfig], Any]
) -> FieldGroup:
    """Map fields to windows: ``read_windows`` returns one of each layer, or a single one of all layers.

    ``write`` maps the name of each field to a function that returns its value.
    """

    def write_fields(config: ModelConfig) -> HFConfig:
        return {name: value(config) for name, value in write.items()}

    return FieldGroup(tuple(write), SETTINGS, _as_settings(read_windows), write_fields)


def _as_settings(read_windows: Callable[[HFConfig], Sequence[Window]]) -> Callable[[HFConfig], Settings]:
    """Return a function that reads settings, given one that reads the windows of layers."""

    def read(hf_config: HFConfig) -> Settings:
        windows = tuple(read_windows(hf_config))
        return {
            "sparsity.window": widest_window(windows),
            "sparsity.layer_windows": windows if len(set(windows)) > 1 else (),
        }

    return read


def _layer_windows(config: ModelConfig) -> tuple[Window, ...]:
    """Return the window of each layer of a model of one stack."""
    return config.windows("decoder" if config.has_decoder else "encoder")


def longformer_windows() -> FieldGroup:
    """Map attention_window: tokens on both sides, one number for all layers or one for each."""

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        value, layers = hf_config.get("attention_window", 512), hf_config["num_hidden_layers"]
        windows = value if isinstance(value, list) else [value]
        even = all(type(window) is int and window > 0 and window % 2 == 0 for window in windows)
        if not even or isinstance(value, list) and len(value) != layers:
            raise SettingError(
                f"config.json: attention_window={value} should be an even number, or one for each of "
                f"{layers} layers"
            )
        return tuple(window // 2 for window in windows)

    return _window_fields(
        read, attention_window=lambda config: [2 * (window or 1) for window in _layer_windows(config)]
    )


def modernbert_windows() -> FieldGroup:
    """Map local_attention, tokens on both sides, which layers of type sliding_attention have.

    Version 4 of transformers has no list of types: every n-th layer, from the first on, has no window.
    """
    period_name = "global_attn_every_n_layers"

    def types_by_period(layers: int, period: int) -> list[str]:
        return [SLIDING if layer % period else FULL for layer in range(layers)]

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        layers = _check_layers(hf_config["num_hidden_layers"])
        size, period = hf_config.get("local_attention", 128), hf_config.get(period_name, 3)
        if type(size) is not int or not 0 <= size < 2**31:
            raise SettingError(f"config.json: local_attention={size!r} should be a number of tokens")
        if hf_config.get("layer_types") is not None:
            types, name = hf_config["layer_types"], "layer_types"
        elif type(period) is int and period > 0:
            types, name = types_by_period(layers, period), period_name
        else:
            raise SettingError(f"config.json: {period_name}={period!r} should be a number of layers")
        return _windows_of_types(name, types, layers, {FULL: None, SLIDING: size // 2})

    def write(config: ModelConfig) -> HFConfig:
        windows = _layer_windows(config)
        types = _layer_types(windows)
        finite = [window for window in windows if window is not None]
        fields: HFConfig = {"local_attention": 2 * max(finite, default=64), "layer_types": types}
        periods = range(1, len(types) + 1)
        found = [period for period in periods if types_by_period(len(types), period) == types]
        if found:
            fields[period_name] = found[0]
        return fields

    names = ("local_attention", "layer_types", period_name)
    return FieldGroup(names, SETTINGS, _as_settings(read), write, superseded=(period_name,))


def _layer_types(windows: Sequence[Window]) -> list[str]:
    """Return the type of each layer by its window."""
    return [FULL if window is None else SLIDING for window in windows]


def _read_causal_window(hf_config: HFConfig, name: str, default: int | None) -> Window:
    """Return the window in the field ``name``, without the position's own token."""
    size = hf_config.get(name, default)
    if size is None:
        return None
    if type(size) is not int or not 0 < size < 2**31:
        raise SettingError(f"config.json: {name}={size!r} should be a number of tokens, or null")
    return size - 1


def _write_causal_window(config: ModelConfig) -> int | None:
    """Return the widest window of the layers that have one, with the position's own token."""
    return max((window + 1 for window in _layer_windows(config) if window is not None), default=None)


def _windows_of_types(
    name: str, layer_types: Any, layers: int, windows: dict[str, Window]
) -> tuple[Window, ...]:
    """Return the window of each layer from its type; SettingError unless there is a known type for each."""
    known = isinstance(layer_types, list) and all(kind in [*windows] for kind in layer_types)
    if not known or len(layer_types) != layers:
        raise SettingError(
            f"config.json: {name}={layer_types!r:.200} should be one of {[*windows]} for each of "
            f"{layers} layers"
        )
    return tuple(windows[kind] for kind in layer_types)


def _check_layers(layers: int) -> int:
    """Return a number of layers; SettingError if a list cannot have so many."""
    if not 1 <= layers <= MAX_LAYERS:
        raise SettingError(f"config.json: {layers} layers should be from 1 to {MAX_LAYERS}")
    return layers


def gemma_windows(period_name: str = "", default_period: int = 2) -> FieldGroup:
    """Map sliding_window, which layers of type sliding_attention have.

    Without a list of types every n-th layer has none, and so sees everything: n is in the field
    ``period_name``, of files of transformers 4, or ``default_period``. A family without that field has "".
    """
    superseded = (period_name,) if period_name else ()

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        layers = _check_layers(hf_config["num_hidden_layers"])
        period = hf_config.get(period_name, default_period)
        if type(period) is not int or period < 1:
            raise SettingError(f"config.json: {period_name}={period!r} should be a number of layers")
        return _alternating_windows(hf_config, "", layers, is_causal=True, period=period)

    def write(config: ModelConfig) -> HFConfig:
        windows = _layer_windows(config)
        size = _write_causal_window(config) or 4_096
        return {"sliding_window": size, "layer_types": _layer_types(windows)}

    names = ("sliding_window", "layer_types", *superseded)
    return FieldGroup(names, SETTINGS, _as_settings(read), write, superseded)


def _alternating_windows(
    hf_config: HFConfig, section: str, layers: int, *, is_causal: bool, period: int = 2
) -> tuple[Window, ...]:
    """Return the window of each layer of a section; without layer_types every ``period``-th layer has none.

    The window of a causal stack counts the position's own token, that of an encoder does not.
    """
    window = _read_causal_window(hf_config, f"{section}sliding_window", 4_096)
    if window is not None and not is_causal:
        window += 1
    types = hf_config.get(f"{section}layer_types")
    if types is None:
        types = [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]
    windows: dict[str, Window] = {FULL: None} | ({} if window is None else {SLIDING: window})
    return _windows_of_types(f"{section}layer_types", types, layers, windows)


def t5gemma_windows() -> FieldGroup:
    """Map sliding_window and layer_types of both stacks, which mean those of Gemma 2 in the decoder."""

    def read(hf_config: HFConfig) -> Settings:
        encoder_layers, decoder_layers = (
            _check_layers(hf_config[f"{side}.num_hidden_layers"]) for side in SIDES
        )
        own = _alternating_windows(hf_config, "encoder.", encoder_layers, is_causal=False)
        read_decoder = _as_settings(
            lambda hf_config: _alternating_windows(hf_config, "decoder.", decoder_layers, is_causal=True)
        )
        settings = read_decoder(hf_config)
        shared = settings["sparsity.layer_windows"] or (settings["sparsity.window"],) * encoder_layers
        return settings | {"encoder.layer_windows": () if own == shared else own}

    def write(config: ModelConfig) -> HFConfig:
        fields: HFConfig = {}
        for side in SIDES:
            windows = config.windows(side)
            # Only a decoder's window counts the position's own token.
            own_token = 1 if side == "decoder" else 0
            sizes = [window + own_token for window in windows if window is not None]
            size = max(sizes, default=4_096)
            fields |= {f"{side}.sliding_window": size, f"{side}.layer_types": _layer_types(windows)}
        return fields

    names = tuple(f"{side}.{name}" for side in SIDES for name in ("sliding_window", "layer_types"))
    return FieldGroup(names, (*SETTINGS, "encoder.layer_windows"), read, write)


def mistral_window(default: Window = 4_096) -> FieldGroup:
    """Map sliding_window, which all layers have, or none; ``default`` is that of a file without the field."""
    return _window_fields(
        lambda hf_config: (_read_causal_window(hf_config, "sliding_window", default),),
        sliding_window=_write_causal_window,
    )


def qwen_windows() -> FieldGroup:
    """Map sliding_window, which some layers have: those that layer_types or max_window_layers says."""

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        layers = hf_config["num_hidden_layers"]
        used = hf_config.get("use_sliding_window", False)
        check_boolean("use_sliding_window", used)
        window = _read_causal_window(hf_config, "sliding_window", 4_096) if used else None
        if hf_config.get("layer_types") is not None:
            windows: dict[str, Window] = {FULL: None}
            if window is not None:
                windows[SLIDING] = window
            return _windows_of_types("layer_types", hf_config["layer_types"], layers, windows)
        full_layers = hf_config.get("max_window_layers", 28)
        if type(full_layers) is not int:
            raise SettingError(f"config.json: max_window_layers={full_layers!r} should be a number of layers")
        full_layers = min(full_layers, layers)
        if window is None or full_layers == layers:
            return (None,)
        return (None,) * full_layers + (window,) * (_check_layers(layers) - full_layers)

    return _window_fields(
        read,
        use_sliding_window=lambda config: _write_causal_window(config) is not None,
        sliding_window=_write_causal_window,
        max_window_layers=lambda config: _layer_windows(config).count(None),
        layer_types=lambda config: _layer_types(_layer_windows(config)),
    )


def gpt_neo_windows() -> FieldGroup:
    """Map window_size, which local layers have; attention_types are repeated patterns of global and local."""

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        windows = {"global": None, "local": _read_causal_window(hf_config, "window_size", 256)}
        patterns = hf_config.get("attention_types") or [[["global", "local"], 12]]
        layers = _check_layers(hf_config["num_layers"])
        layer_types: list[Any] = []
        if isinstance(patterns, list) and all(_is_pattern(pattern, layers) for pattern in patterns):
            layer_types = [kind for kinds, repeats in patterns for kind in kinds * repeats]
        if len(layer_types) != layers:
            raise SettingError(f"config.json: attention_types={patterns!r:.200} should name {layers} layers")
        if hf_config.get("attention_layers") not in (None, layer_types):
            raise SettingError("config.json: attention_layers should be those of attention_types")
        return _windows_of_types("attention_types", layer_types, layers, windows)

    def layer_types(config: ModelConfig) -> list[str]:
        return ["global" if window is None else "local" for window in _layer_windows(config)]

    return _window_fields(
        read,
        window_size=lambda config: _write_causal_window(config) or 256,
        attention_types=lambda config: [[[kind], 1] for kind in layer_types(config)],
        attention_layers=layer_types,
    )


def _is_pattern(value: Any, layers: int) -> bool:
    """Return whether a value is [types, repeats], with at most ``layers`` types and repeats."""
    match value:
        case [[*kinds], int(repeats)]:
            return len(kinds) <= layers and 0 <= repeats <= layers
    return False
