"""Layouts of the tensors of a batch: the operators that read them follow; numbers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.auto.auto import Auto
from pdrun.parallel.auto.mindspore_strategies import MindSporeOperators
from pdrun.parallel.auto.plan_file import read_plan
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.data.batch_slicing import slice_by_layouts
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize
from tests.lib.shared_exports import share_exports

pytestmark = pytest.mark.torch

ROWS, LENGTH, WORDS = 8, 4, 12


class Mixer(nn.Module):
    """A sequence model whose positions depend on those before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.emb, self.up = nn.Embedding(WORDS, 8), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, WORDS)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x + x.cumsum(1))


class Picture(nn.Module):
    """A convolution, which cannot be split along the width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    flat = output.flatten(0, -2)
    return F.cross_entropy(flat, batch[1].flatten(), reduction="sum"), batch[1].numel()


def make_batches(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    if kind == "picture":
        return [
            (torch.randn(ROWS, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (ROWS,)))
            for _ in range(2)
        ]
    shape = (ROWS, LENGTH)
    return [(torch.randint(0, WORDS, shape), torch.randint(0, WORDS, shape)) for _ in range(2)]


GRID = Layout((2, 2), ("dp", "sp"))
WEIGHTS = {"up.weight": L("x", None), "down.weight": L(None, "x")}
CASES: dict[str, tuple[str, dict[str, int] | None, Any, dict[str, Any], str]] = {
    "a sequence": ("words", {"x": 4}, ((1, 4), (1, 4)), {}, "[-, x]"),
    "rows and a sequence": ("words", {"dp": 2, "x": 2}, ((2, 2), (2, 2)), {}, "[-, x]"),
    "layouts, without a mesh": (
        "words",
        None,
        (GRID("dp", "sp"), GRID("dp", "None")),
        {},
        "[-, tp]",
    ),
    "beside sharded weights": ("words", {"x": 2, "y": 2}, (L(None, "y"), None), WEIGHTS, "[-, y]"),
    "all ones": ("words", {"dp": 2, "x": 2}, ((1, 1), (1, 1)), WEIGHTS, "[-, -]"),
    "rows over a tensor axis": ("words", {"x": 4}, ((4, 1), (4, 1)), {}, "[x, -]"),
    "an operator that cannot follow": (
        "picture",
        {"x": 4},
        ((1, 1, 1, 4), (1,)),
        {},
        "[-, -, -, -]",
    ),
}


def train(case: str) -> tuple[list[float], list[float], str]:
    """Return losses, counts, and the plan's first operator; "alone" is one process."""
    kind, degrees, layouts, entries, _ = CASES[case.removeprefix("alone ")]
    batches = make_batches(kind)
    model = share_exports(Picture() if kind == "picture" else Mixer())
    options: dict[str, Any] = {}
    if not case.startswith("alone "):
        options = {"strategy": Operators(entries), "dataset_strategy": layouts}
        options["mesh"] = degrees and make_mesh(**degrees)
    run = parallelize(
        model, lambda params: torch.optim.SGD(params, 0.5), loss, sample=batches[0], **options
    )
    if options:
        run.verify(batches[:1])
    metrics = [run.step(batch) for batch in batches]
    lines = run.model.explain().splitlines() if options else [""]
    first = next((line for line in lines if line.startswith(("emb.", "conv."))), "")
    return [one.loss for one in metrics], [one.tokens for one in metrics], first


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_process(worlds: Any, case: str) -> None:
    losses, tokens, _ = worlds(1).run(train, f"alone {case}")[0]
    for found, counts, first in worlds(4).run(train, case):
        assert found == pytest.approx(losses, rel=1e-12)
        assert counts == tokens or case == "all ones"
        assert CASES[case][-1] in first


def test_strategies_of_files_and_searches_know_them(worlds: Any, tmp_path: Path) -> None:
    """
    A search keeps the layouts, a file of MindSpore's is completed by them, a plan file has all.
    """
    assert worlds(2).run(follow, str(tmp_path)) == [True] * 2


def follow(folder: str) -> bool:
    batch = make_batches("words")[0]
    value = {
        "parallel_strategy_item": {
            "Default/up-Dense/MatMul-op0": {
                "stage": 0,
                "parallel_strategy": [[1, 2, 1], [1, 1]],
            }
        }
    }

    def make(strategy: Any, **options: Any) -> Any:
        return parallelize(
            share_exports(Mixer()),
            lambda params: torch.optim.SGD(params, 0.5),
            loss,
            mesh=make_mesh(x=2),
            strategy=strategy,
            sample=batch,
            **options,
        )

    layouts = ((1, 2), (1, 2))
    for strategy in (Auto(topology="cpu"), MindSporeOperators(value, "ops.json")):
        run = make(strategy, dataset_strategy=layouts)
        assert "emb.embedding: [-, -], [-, x]" in run.model.explain()
    plan = f"{folder}/plan{torch.distributed.get_rank()}.json"
    run.plan.save(plan)
    with pytest.raises(UsageError, match="has the layouts of all operators"):
        make(read_plan(plan).make_strategy(), dataset_strategy=layouts)
    return True


def test_rows_are_sliced_over_the_data_axis_only() -> None:
    assert slice_by_layouts(((2, 4), (2, 4)), 2).dims == (0, 0)
    assert slice_by_layouts(((2, 4), None), 2).dims == (0, None)
    assert slice_by_layouts((L("dp", "x"), L(None)), 2).dims == (0, None)
    assert slice_by_layouts(((1, 4), (1, 4)), 2).full_batch
    assert slice_by_layouts(((4, 1),), 1).dims is None


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        (((1, 4),), "has 1 entries, the sample has 2 tensors"),
        (((1, 3), (1, 4)), "no axes make the counts"),
        (((1, 4), 0), "entries must be layouts, counts or None, got 0"),
    ],
)
def test_mistakes_are_named(worlds: Any, layouts: Any, text: str) -> None:
    assert worlds(4).run(refuse, layouts, text) == [True] * 4


def refuse(layouts: Any, text: str) -> bool:
    batch = make_batches("words")[0]
    with pytest.raises(UsageError, match=text):
        parallelize(
            share_exports(Mixer()),
            lambda params: torch.optim.SGD(params, 0.5),
            loss,
            mesh=make_mesh(x=4),
            strategy=Operators({}),
            sample=batch,
            dataset_strategy=layouts,
        )
    return True
