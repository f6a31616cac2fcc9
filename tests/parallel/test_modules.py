"""Module styles: a cut model has the losses and gradients of the whole one, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.modules import cross_entropy
from tests.parallel import decoder

pytestmark = pytest.mark.torch


def same(names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any], how: dict[str, Any]) -> None:
    """Compare a decoder with its cut copy, in both precisions."""
    for dtype in (torch.float64, torch.float32):
        model = decoder.build(dtype, **options)
        words = options.get("words", 37)
        loss = _own_loss if how.get("gather", True) is False else None
        decoder.compare(model, decoder.strategy(**how), Grid(names, sizes), decoder.tokens(words), cut_loss=loss)


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("options", "how"), [
    ({}, {}),
    ({"bias": False, "tied": True}, {}),
    ({"n_kv": 8, "tied": True, "padding": 3}, {"gather": False}),
    ({"n_kv": 2, "words": 41}, {"gather": False}),
    ({"n_kv": 1}, {}),
], ids=["plain", "tied", "cut-logits", "two-kv-heads", "one-kv-head"])  # fmt: skip
def test_a_cut_model_equals_the_whole(worlds: Any, options: Any, how: Any, sequence: bool) -> None:
    worlds(4).run(same, ("tp",), (4,), options, {**how, "sequence": sequence})


@pytest.mark.parametrize("axis", ["y", ("x", "y"), ("y", "x")])
def test_axes_of_any_name_and_several_at_once(worlds: Any, axis: Any) -> None:
    worlds(4).run(same, ("x", "y"), (2, 2), {"hidden": 48, "words": 40}, {"axis": axis, "sequence": True})


def test_a_data_axis_beside_it(worlds: Any) -> None:
    worlds(4).run(same, ("dp", "tp"), (2, 2), {}, {})
