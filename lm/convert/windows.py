"""Fields of config.json that say how far each layer's self-attention sees.

A published window counts the position's own token, and Longformer's counts both sides. Ours count the tokens
before the position; None: the layer sees everything.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.convert.fields import check_boolean
from lm.convert.schema import FieldGroup, HFConfig, Settings

Window = int | None
MAX_LAYERS = 10_000  # for which a list of windows is made


def _window_fields(
    read_windows: Callable[[HFConfig], Sequence[Window]], **write: Callable[[ModelConfig], Any]
) -> FieldGroup:
    """Map fields to windows: ``read_windows`` returns one of each layer, or a single one of all layers.

    ``write`` maps the name of each field to a function that returns its value.
    """

    def read(hf_config: HFConfig) -> Settings:
        windows = tuple(read_windows(hf_config))
        finite = [window for window in windows if window is not None]
        return {
            "sparsity.window": max(finite) if len(finite) == len(windows) else None,
            "sparsity.layer_windows": windows if len(set(windows)) > 1 else (),
        }

    def write_fields(config: ModelConfig) -> HFConfig:
        return {name: value(config) for name, value in write.items()}

    return FieldGroup(tuple(write), ("sparsity.window", "sparsity.layer_windows"), read, write_fields)


def _layer_windows(config: ModelConfig) -> tuple[Window, ...]:
    """Return the window of each layer."""
    layers = config.num_decoder_layers if config.has_decoder else config.num_encoder_layers
    return config.sparsity.layer_windows or (config.sparsity.window,) * layers


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


def _read_causal_window(hf_config: HFConfig, name: str, default: int) -> Window:
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
    """Return a number of layers; SettingError if it is too large for a list."""
    if layers > MAX_LAYERS:
        raise SettingError(f"config.json: {layers} layers are more than any model has")
    return layers


def mistral_window() -> FieldGroup:
    """Map sliding_window, which all layers have, or none."""
    return _window_fields(
        lambda hf_config: (_read_causal_window(hf_config, "sliding_window", 4_096),),
        sliding_window=_write_causal_window,
    )


def qwen_windows() -> FieldGroup:
    """Map sliding_window, which some layers have: those that layer_types or max_window_layers says."""
    full, sliding = "full_attention", "sliding_attention"

    def read(hf_config: HFConfig) -> tuple[Window, ...]:
        layers = hf_config["num_hidden_layers"]
        used = hf_config.get("use_sliding_window", False)
        check_boolean("use_sliding_window", used)
        window = _read_causal_window(hf_config, "sliding_window", 4_096) if used else None
        if hf_config.get("layer_types") is not None:
            windows: dict[str, Window] = {full: None}
            if window is not None:
                windows[sliding] = window
            return _windows_of_types("layer_types", hf_config["layer_types"], layers, windows)
        full_layers = min(hf_config.get("max_window_layers", 28), layers)
        if window is None or full_layers == layers:
            return (None,)
        return (None,) * full_layers + (window,) * (_check_layers(layers) - full_layers)

    return _window_fields(
        read,
        use_sliding_window=lambda config: _write_causal_window(config) is not None,
        sliding_window=_write_causal_window,
        max_window_layers=lambda config: _layer_windows(config).count(None),
        layer_types=lambda config: [full if window is None else sliding for window in _layer_windows(config)],
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
