"""The operator engine: a cut model has the numbers of one process, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pdrun.parallel.layouts.layout import L
from tests.parallel import nets

pytestmark = pytest.mark.torch

MEGATRON = {
    "blocks.*.up.weight": L("tp", None), "blocks.*.down.weight": L(None, "tp"), "blocks.*.proj.weight": L(None, "tp"),
}  # fmt: skip
LLAMA = {
    "[qkv].weight": L("tp", None), "o.weight": L(None, "tp"), "gate.weight": L("tp", None), "up.weight": L("tp", None),
    "down.weight": L(None, "tp"), "emb.weight": L("tp", None),
}  # fmt: skip
TABLES = {
    "users.weight": L("tp", None), "items.weight": L(None, "tp"), "tags.weight": L(None, "tp"),
    "fc1.weight": L("tp", None), "fc2.weight": L(None, "tp"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "axes", "entries"), [
    ("perceptron", {"tp": 2}, {}),
    ("perceptron", {"tp": 2}, {"fc1": ((2, 1), (1, 1))}),
    ("perceptron", {"tp": 2}, {"fc1": ((1, 1), (2, 1))}),
    ("perceptron", {"tp": 2}, {"fc1": ((1, 2), (1, 2))}),
    ("perceptron", {"tp": 2}, {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}),
    ("uneven", {"tp": 2}, {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}),
    ("tiny", {"tp": 2}, MEGATRON),
    ("llama", {"tp": 2}, LLAMA),
    ("conv", {"tp": 2}, {"one.weight": L("tp", None, None, None), "two.weight": L(None, "tp", None, None)}),
    ("recommender", {"tp": 2}, TABLES),
], ids=str)  # fmt: skip
def test_a_cut_model_has_the_numbers_of_one_process(worlds: Any, name: str, axes: dict[str, int], entries: Any) -> None:
    size = 1
    for degree in axes.values():
        size *= degree
    worlds(size).run(nets.compare, name, axes, entries)
