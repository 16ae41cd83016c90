"""``lm attention``: where the heads of a model attend, a panel for each head, a line for each layer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.runs.stages import stages_of
from lm.data.text.vocabulary import Vocabulary
from lm.settings import SettingError

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.trained import Trained

WATCHED = 16  # longest answer that a decoder is watched writing [tokens]
WIDEST = 48.0  # picture [inches]
PICTURES = (".png", ".svg", ".pdf")  # of pictures
LONGEST_LABELLED = 24  # longest text whose tokens are written beside the panels [tokens]


def attention(run: Path, /, text: str, mixture: str = "", out: Path = Path("attention.png")) -> None:
    """Draw where each head of a run's model attends in a text, one line of panels per layer.

    Args:
        run: folder of a run.
        text: what the model reads; an encoder-decoder is watched writing its answer.
        mixture: which fine-tuned model; by default the pre-trained one.
        out: picture to write, .png, .svg or .pdf.
    """
    from experiments.runs.trained import open_run

    if not text.strip():
        raise SettingError("--text is empty: give a sentence to look at")
    if out.suffix.lower() not in PICTURES:
        raise SettingError(
            f"--out {out} should be a picture that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    trained = open_run(run, stages_of(run), mixture)
    maps, ids = attention_maps(trained, trained.encode(text))
    if not maps:
        raise SettingError(f"{run} has no attention to draw: model.mixer={trained.config.mixer!r}")
    labels = {side: [_label(trained.vocabulary, token) for token in tokens] for side, tokens in ids.items()}
    draw_heads(maps, labels, out)
    sizes = (f"{len(layers)} layers of {layers.shape[1]} heads ({name})" for name, layers in maps.items())
    print(f"{out}: {', '.join(sizes)}")


def attention_maps(run: "Trained", ids: list[int]) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """``{"encoder", "decoder", "cross": [layers,N,T,S]}``, of those there are, and each side's tokens."""
    from lm.evaluate.decode import greedy

    config = run.config
    batch, tokens = run.batch([ids]), {"encoder" if config.has_encoder else "decoder": ids}
    if config.has_encoder and config.has_decoder:
        answer = np.asarray(greedy(run.model, batch, max_length=WATCHED))[0].tolist()
        end = answer.index(config.special.eos) if config.special.eos in answer else len(answer)
        start = [] if config.special.start is None else [config.special.start]
        tokens["decoder"] = start + answer[:end]
        rows = np.tile(np.array(tokens["decoder"], np.int32), (run.devices, 1))
        batch |= run.put({"decoder_input_tokens": rows})
    return {name: np.asarray(weights[:, 0]) for name, weights in run.model.attention(batch).items()}, tokens


def draw_heads(maps: dict[str, np.ndarray], labels: dict[str, list[str]], out: Path) -> None:
    """One picture of all layers [layers,N,T,S] and heads."""
    from matplotlib.figure import Figure  # without pyplot nothing looks for a display

    rows = [(name, layer, heads) for name, layers in maps.items() for layer, heads in enumerate(layers, 1)]
    longest = max(len(tokens) for tokens in labels.values())
    columns = max(len(heads) for _, _, heads in rows)
    size = min(1.0 + 0.12 * min(longest, LONGEST_LABELLED), WIDEST / max(len(rows), columns))
    figure = Figure(figsize=(size * columns + 0.8, size * len(rows) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, layer, heads) in zip(panels, rows, strict=True):
        queries, keys = ("decoder", "encoder") if name == "cross" else (name, name)
        for head, panel in enumerate(line):
            panel.set(xticks=[], yticks=[])
            if head >= len(heads):
                panel.set_axis_off()
                continue
            panel.imshow(heads[head], cmap="Greys", vmin=0, vmax=1, aspect="auto")
            panel.set_title(f"{name} {layer}, head {head + 1}", fontsize=6)
            _ticks(panel, labels[queries] if head == 0 else [], labels[keys])
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def _ticks(panel: Any, queries: list[str], keys: list[str]) -> None:
    if len(queries) <= LONGEST_LABELLED:
        panel.set_yticks(range(len(queries)), queries, fontsize=5)
    if len(keys) <= LONGEST_LABELLED:
        panel.set_xticks(range(len(keys)), keys, fontsize=5, rotation=90)


def _label(vocabulary: Vocabulary, token: int) -> str:
    for name in ("mask", "cls", "sep", "eos", "pad"):
        if token == getattr(vocabulary, name):
            return f"[{name.upper()}]"
    return vocabulary.decode([token]).replace("$", r"\$") or f"<{token}>"
