"""
Classify scikit-learn's handwritten digits, 1,797 pictures of 8 x 8 points, on any number of
workers.

    python examples/classify_digits.py
    pdrun --devices 3 examples/classify_digits.py

Both print the same losses, up to rounding, and classify 94 of 100 correctly. Needs scikit-learn,
which has the pictures.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pdrun


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 10),
    )


def main() -> None:
    context = pdrun.init()
    digits = load_digits()
    pictures = torch.tensor(digits.images / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    run = pdrun.parallelize(
        network(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss=lambda output, batch: (
            F.cross_entropy(output, batch[1], reduction="sum"),
            len(batch[1]),
        ),
        optimizer_level=1,
    )
    loader = pdrun.Loader(TensorDataset(pictures[train], labels[train]), batch=96, shuffle=True)
    for epoch in range(1, 11):
        total = sum((m := run.step(batch)).loss * m.tokens for batch in run.data(loader))
        if context.is_main:
            print(f"epoch {epoch:2}  loss {total / 1500:.6f}", flush=True)
    found = run.evaluate(
        pdrun.Loader(TensorDataset(pictures[test], labels[test]), batch=96),
        metrics={"right": lambda out, batch: ((out.argmax(1) == batch[1]).sum(), len(batch[1]))},
    )
    if context.is_main:
        print(f"right: {100 * found['right']:.1f} of 100, loss {found.loss:.6f}")


if __name__ == "__main__":
    main()
