"""
The architectures of `model_zoo.py`: small configurations with random weights, nothing is loaded.

Each has a function that builds the model and one that makes a batch. A batch depends on its number
of rows and on the step only. Dropout is off: torch and pdrun draw other masks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY = 64
LENGTH = 12
IGNORED_LABEL = -100
IMAGE_PIXELS = 32
CLASSES = 6

Batch = Any
StylesOf = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Architecture:
    """
    A model of the zoo.

    Attributes:
        library: that it is from.
        build: makes the model, with the seed set before.
        batch: makes a batch of ``(rows, step)``.
        loss: ``loss(output, batch)``; a scalar, or (sum, count).
        forward: as in `pdrun.parallelize`.
        styles: returns the module styles of the model; None: `pdrun.strategy_for`.
        traits: "causal": a decoder that computes each position from earlier ones;
            "batchnorm": its output depends on the other rows of a slice;
            "transformers": takes ``input_ids`` and ``labels``.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], Any]
    forward: Callable[[nn.Module, Batch], Any] | None = None
    styles: StylesOf | None = None
    traits: frozenset[str] = frozenset()


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Return the loss that a model of transformers has computed."""
    loss: torch.Tensor = output.loss
    return loss


def class_loss(output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the cross-entropy of one class per row."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])


def token_loss(output: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of one class per token."""
    logits = getattr(output, "logits", output)
    targets = batch["targets"] if isinstance(batch, dict) else batch[1]
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total, (targets != IGNORED_LABEL).sum()


def picture_loss(output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the squared error of a picture."""
    picture = getattr(output, "sample", output)
    target = batch["target"] if isinstance(batch, dict) else batch[1]
    return (picture[:, : target.shape[1]] - target).square().sum(), target.numel()


def make_generator(step: int) -> torch.Generator:
    """Return the generator of a step's batch."""
    return torch.Generator().manual_seed(1000 + step)


def text_batch(rows: int, step: int, ends: bool = True) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels; sequences end early, so rows have other numbers of labels."""
    generator = make_generator(step)
    ids = torch.randint(4, VOCABULARY, (rows, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    if not ends:
        return {"input_ids": ids, "labels": labels}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_text_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    """Return the same without a mask."""
    return text_batch(rows, step, ends=False)


def shifted_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    """Return the batch of context parallel: targets are shifted before, positions are given."""
    batch = text_batch(rows, step, ends=False)
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    positions = torch.arange(LENGTH).expand(rows, LENGTH).contiguous()
    return {"input_ids": batch["input_ids"], "position_ids": positions, "targets": targets}


def image_batch(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures and classes."""
    generator = make_generator(step)
    pictures = torch.randn(rows, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=generator)
    return pictures, torch.randint(CLASSES, (rows,), generator=generator)


def token_pairs(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of plain models."""
    batch = text_batch(rows, step)
    return batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
