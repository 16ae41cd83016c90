"""Record what torch's recurrent layers compute.

``python make_recurrent.py`` needs torch 2.13, the tests do not.

``recurrent.npz`` holds for ``rnn``, ``gru`` and ``lstm``, one way and both ways: weights by torch's names,
inputs x [B,T,D], outputs y [B,T,h] or [B,T,2h], and the gradients of sum(y * up) by x and by each weight.
"""

from pathlib import Path

import numpy as np
import torch

LAYERS = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
ROWS, LENGTH, WIDTH = 2, 5, 6


def recorded(name: str, both_ways: bool) -> dict[str, np.ndarray]:
    """Arrays by ``name/ways/what``."""
    layer = LAYERS[name](WIDTH, WIDTH // (1 + both_ways), batch_first=True, bidirectional=both_ways)
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    y, _ = layer(x)
    up = torch.randn_like(y)
    (y * up).sum().backward()
    arrays = {"x": x, "y": y, "up": up, "grad/x": x.grad}
    for weight, value in layer.named_parameters():
        arrays |= {weight: value, f"grad/{weight}": value.grad}
    ways = "both" if both_ways else "one"
    return {f"{name}/{ways}/{what}": array.detach().numpy() for what, array in arrays.items()}


def main() -> None:
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    for name in LAYERS:
        arrays |= recorded(name, False) | recorded(name, True)
    np.savez_compressed(Path(__file__).with_name("recurrent.npz"), **arrays)


if __name__ == "__main__":
    main()
