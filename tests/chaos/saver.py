"""
A worker with torch that saves one checkpoint after another, for faults while it saves.

    saver.py FOLDER [check]

FOLDER/saving-RANK appears when the rank begins its third save; FOLDER/checkpoints has the saves.
``check`` loads the newest one, all of it, and prints its step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import pdrun

FOLDER = Path(sys.argv[1])


def mean_error(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error, the mean over all rows."""
    return (output - batch[1]).square().mean()


def main() -> None:
    """Save until the job is ended from outside, or load what was saved."""
    context = pdrun.init(collective="gloo", backend="cpu")
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = pdrun.parallelize(model, optimizer, mean_error)
    if "check" in sys.argv:
        run.load(FOLDER / "checkpoints")
        print(f"complete: step {run.steps}")
        return
    batch = (torch.ones(6, 256), torch.zeros(6, 256))
    while True:
        run.step(batch)
        if run.steps == 3:
            (FOLDER / f"saving-{context.rank}").touch()
        run.save(FOLDER / "checkpoints", keep=2)


if __name__ == "__main__":
    main()
