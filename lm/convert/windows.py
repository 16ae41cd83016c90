"""How far each layer sees, as the fields of published families say it.

Theirs count a position's own token, and Longformer's both sides; ours count the tokens before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm.convert.family import Json, Key
from lm.nn.config import ModelConfig
from lm.settings import SettingError

MOST_LAYERS = 10_000  # that a list is made for


def window_keys(
    read: Callable[[Json], Sequence[int | None]], **write: Callable[[ModelConfig], Any]
) -> tuple[Key, ...]:
    """Fields of theirs to ``write``; from them all ``read`` gives the window of each layer, or one of all."""

    def layers(_: Any, theirs: Json) -> tuple[int | None, ...]:
        windows = tuple(read(theirs))
        return windows if len(set(windows)) > 1 else ()

    def widest(_: Any, theirs: Json) -> int | None:
        windows = read(theirs)
        finite = [window for window in windows if window is not None]
        return max(finite) if len(finite) == len(windows) else None

    def pair(name: str, written: Callable[[ModelConfig], Any]) -> tuple[Key, Key]:
        def theirs(_: Any, config: ModelConfig) -> Any:
            return written(config)

        widest_key = Key(name, "sparsity.window", None, widest, theirs)
        return widest_key, Key(name, "sparsity.layer_windows", None, layers, theirs)

    return tuple(key for name, written in write.items() for key in pair(name, written))


def _of_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer."""
    layers = config.num_decoder_layers if config.has_decoder else config.num_encoder_layers
    return config.sparsity.layer_windows or (config.sparsity.window,) * layers


def attention_window_keys() -> tuple[Key, ...]:
    """Longformer's windows, which count both sides: one for all layers, or one for each."""

    def read(theirs: Json) -> tuple[int, ...]:
        value, layers = theirs.get("attention_window", 512), theirs["num_hidden_layers"]
        windows = value if isinstance(value, list) else [value]
        even = all(type(window) is int and window > 0 and window % 2 == 0 for window in windows)
        if not even or isinstance(value, list) and len(value) != layers:
            due = f"an even number, or one for each of {layers} layers"
            raise SettingError(f"config.json: attention_window={value} should be {due}")
        return tuple(window // 2 for window in windows)

    return window_keys(read, attention_window=lambda own: [2 * (window or 1) for window in _of_layers(own)])


def _behind(theirs: Json, name: str, default: int | None) -> int | None:
    """How many tokens before its own a position sees; their windows count its own too."""
    window = theirs.get(name, default)
    if window is not None and (type(window) is not int or not 0 < window < 2**31):
        raise SettingError(f"config.json: {name}={window!r} should be a number of tokens, or null")
    return None if window is None else window - 1


def _width(config: ModelConfig) -> int | None:
    """The same, from ours: of the layers that have a window."""
    return max((window + 1 for window in _of_layers(config) if window is not None), default=None)


def _by_kind(name: str, kinds: Any, layers: int, windows: Mapping[str, int | None]) -> tuple[int | None, ...]:
    """The window of each of ``kinds`` [layers], as the field ``name`` has them."""
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in [*windows] for kind in kinds):
        raise SettingError(
            f"config.json: {name}={kinds!r:.200} should be one of {[*windows]} for each of {layers} layers"
        )
    return tuple(windows[kind] for kind in kinds)


def sliding_keys() -> tuple[Key, ...]:
    """One window for all layers, or none (Mistral)."""
    return window_keys(lambda theirs: (_behind(theirs, "sliding_window", 4_096),), sliding_window=_width)


def layer_type_keys() -> tuple[Key, ...]:
    """A window in layers of one type (Qwen): by a list of types or, without it, from a layer on."""
    types = "full_attention", "sliding_attention"

    def read(theirs: Json) -> tuple[int | None, ...]:
        used, layers = theirs.get("use_sliding_window", False), theirs["num_hidden_layers"]
        if not isinstance(used, bool):
            raise SettingError(f"config.json: use_sliding_window={used!r} should be true or false")
        window = _behind(theirs, "sliding_window", 4_096) if used else None
        windows = {types[0]: None} | ({} if window is None else {types[1]: window})
        if theirs.get("layer_types") is not None:
            return _by_kind("layer_types", theirs["layer_types"], layers, windows)
        whole = min(theirs.get("max_window_layers", 28), layers)
        if window is None or whole == layers:
            return (None,)
        return (None,) * whole + (window,) * (_few(layers) - whole)

    return window_keys(
        read,
        use_sliding_window=lambda own: _width(own) is not None,
        sliding_window=_width,
        max_window_layers=lambda own: sum(window is None for window in _of_layers(own)),
        layer_types=lambda own: [types[window is not None] for window in _of_layers(own)],
    )


def local_keys() -> tuple[Key, ...]:
    """Layers that see everything and such with a window, by repeated patterns of them (GPT-Neo)."""
    kinds = "global", "local"

    def read(theirs: Json) -> tuple[int | None, ...]:
        windows = dict(zip(kinds, (None, _behind(theirs, "window_size", 256)), strict=True))
        patterns = theirs.get("attention_types") or [[[*kinds], 12]]
        layers = _few(theirs["num_layers"])
        match patterns:
            case [*_] if all(_repeats(pattern, layers) for pattern in patterns):
                listed = [kind for pattern, times in patterns for kind in pattern * times]
            case _:
                listed = []
        if len(listed) != layers:
            raise SettingError(f"config.json: attention_types={patterns!r:.200} should name {layers} layers")
        if theirs.get("attention_layers") not in (None, listed):
            raise SettingError("config.json: attention_layers should be those of attention_types")
        return _by_kind("attention_types", listed, len(listed), windows)

    def written(own: ModelConfig) -> list[str]:
        return [kinds[window is not None] for window in _of_layers(own)]

    return window_keys(
        read,
        window_size=lambda own: _width(own) or 256,
        attention_types=lambda own: [[[kind], 1] for kind in written(own)],
        attention_layers=written,
    )


def _repeats(pattern: Any, layers: int) -> bool:
    """Whether it is a list of some kinds and how many times they follow one another."""
    match pattern:
        case [[*kinds], int(times)]:
            return len(kinds) <= layers and 0 <= times <= layers
    return False


def _few(layers: int) -> int:
    """As many layers, if they can be listed."""
    if layers > MOST_LAYERS:
        raise SettingError(f"config.json: {layers} layers are more than any model has")
    return layers
