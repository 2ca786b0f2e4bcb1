"""Sequences: a GRU and an LSTM on signals (steps x features), a small Transformer on word indices.

    feddbe run fedavg+dbe --data signals.npz --model examples/sequences.py:gru --lr 0.2 --local-epochs 5
    feddbe run fedavg+dbe --data words.npz --model examples/sequences.py:transformer --lr 0.2 --local-epochs 5

Arrays are passed to a model unchanged. Integers are word indices if the file has the size of their
vocabulary, `words`, or the name has it, as in words.npz?words=100. A function that returns a model is called
with those of (shape, classes, words) that are its parameters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import feddbe


class Recurrent(nn.Module):
    """The last state of a recurrent layer, and a linear classifier."""

    def __init__(self, layer: nn.Module, size: int, classes: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x)
        logits: Tensor = self.head(states[:, -1])
        return logits


def gru(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a GRU for sequences of `shape` = (steps, features)."""
    return Recurrent(nn.GRU(shape[-1], 32, batch_first=True), 32, classes)


def lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return an LSTM for sequences of `shape` = (steps, features)."""
    return Recurrent(nn.LSTM(shape[-1], 32, batch_first=True), 32, classes)


class Transformer(nn.Module):
    """Embeddings of words and positions, one encoder layer, the mean over the text, a linear classifier."""

    def __init__(self, words: int, length: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(length, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.words(x) + self.positions).mean(1))
        return logits


def transformer(shape: tuple[int, ...], classes: int, words: int) -> nn.Module:
    """Return a Transformer for texts of `shape` = (length,) with a vocabulary of `words`."""
    return Transformer(words, shape[0], classes)


def write_signals(path: Path) -> None:
    """Write noisy signals that rise, fall or stay, of five clients."""
    rng = np.random.RandomState(0)
    y = rng.randint(0, 3, 300)
    slope = np.linspace(-1, 1, 12)[None, :, None] * (y - 1)[:, None, None]
    x = (slope + rng.randn(300, 1, 4) + 0.5 * rng.randn(300, 12, 4)).astype(np.float32)
    np.savez(path, x=x, y=np.array(["falls", "stays", "rises"])[y], client=rng.randint(0, 5, 300))


def write_texts(path: Path) -> None:
    """Write texts of twelve words, three of which are from the ten words of its topic."""
    rng = np.random.RandomState(0)
    y = rng.randint(0, 3, 300)
    x = rng.randint(31, 100, (300, 12))
    x[:, ::4] = 1 + 10 * y[:, None] + rng.randint(0, 10, (300, 3))
    np.savez(path, x=x, y=y, client=rng.randint(0, 5, 300), words=100)


if __name__ == "__main__":
    write_signals(Path("signals.npz"))
    write_texts(Path("words.npz"))
    for name, data in {"gru": "signals.npz", "lstm": "signals.npz", "transformer": "words.npz"}.items():
        run = feddbe.run(
            "fedavg+dbe",
            data=data,
            model=f"{__file__}:{name}",
            lr=0.2,
            local_epochs=5,
            rounds=5,
            engine="serial",
        )
        best = run["best"]["accuracy"]["weighted"] if run["best"] and run["best"]["accuracy"] else 0.0
        print(f"{name}: accuracy {best:.2f}, by chance {1 / len(run['label_names']):.2f}")
        assert best > 0.6
