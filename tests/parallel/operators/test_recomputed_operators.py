"""Results of single operators are computed again in the backward pass instead of being kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.recomputed import RecomputedCall, recompute_results
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize
from tests.lib import tiers
from tests.lib.shared_exports import share_exports

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))).flatten(1).view_as(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(torch.softmax(x, -1)).mean(1))


class ResultCounter(TorchDispatchMode):
    """Counts the results of an operator that live."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.results: list[weakref.ref[Any]] = []
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == self.name:
            self.calls += 1
            self.results.append(weakref.ref(result.untyped_storage()))
        return result


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def make_run(recompute: Any, **options: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(2)
    batches = [(torch.randn(8, 3, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    entries = {"blocks.*.up.weight": L("tp", None), "blocks.*.down.weight": L(None, "tp")}
    run = parallelize(
        share_exports(Net()),
        lambda params: torch.optim.SGD(params, 0.5),
        loss,
        strategy=Operators(entries),
        sample=batches[0],
        recompute=recompute,
        norm=True,
        **options,
    )
    return run, batches


EACH = {"operators": ["blocks.*.gelu", "blocks.*.layer_norm", "softmax", "blocks.*.linear"]}


def train(recompute: Any, degrees: dict[str, int], options: dict[str, Any]) -> Any:
    """Return losses and norms of two steps; calls of gelu and collectives of the last one."""
    calls = 0
    if "mesh" not in options:
        options = {**options, "mesh": pdrun.mesh(**degrees)}
    run, batches = make_run(recompute, **options)
    numbers = []
    for batch in batches:
        run.axes.reset_counts()
        with ResultCounter("gelu") as counter:
            metrics = run.step(batch)
        calls = counter.calls
        numbers += [metrics.loss, metrics.grad_norm]
    return numbers, calls, {key: one.calls for key, one in run.axes.counts.items()}


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"tp": 2}, {}),
        ({"dp": 2}, {"optimizer_level": 3, "accumulate": 2}),
        ({"pp": 2}, {"pipeline": pdrun.Pipeline(2, stages={"blocks.0": 0, "blocks.1": 1})}),
        tiers.thorough({"tp": 2}, {"precision": pdrun.Precision("bf16", autocast=True)}),
        tiers.thorough({"tp": 2}, {"copies": 2}),
        (
            {"pp": 2},
            {
                "pipeline": pdrun.Pipeline(
                    2, schedule="zero-bubble", stages={"blocks.0": 0, "blocks.1": 1}
                )
            },
        ),
    ],
    ids=["tp", "level 3", "stages", "autocast", "copies", "zero-bubble"],
)
def test_numbers_stay_and_nothing_more_is_sent(
    worlds: Any, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    kept = worlds(2).run(train, None, degrees, options)
    again = worlds(2).run(train, EACH, degrees, options)
    for (numbers, calls, sent), (numbers_again, calls_again, sent_again) in zip(
        kept, again, strict=True
    ):
        assert numbers_again[::2] == numbers[::2]
        assert numbers_again[1::2] == pytest.approx(numbers[1::2], rel=1e-14)  # fp64 sums
        assert calls_again == 2 * calls  # once more for each backward
        assert sent_again == sent


def test_results_do_not_live_until_the_backward_pass(worlds: Any) -> None:
    assert worlds(1).run(count_living, None)[0] == 2
    assert worlds(1).run(count_living, {"operators": "blocks.*.gelu"})[0] == 0
    assert worlds(1).run(count_living, {"operators": "blocks.0.gelu"})[0] == 1


def count_living(recompute: Any) -> int:
    """Return how many results of gelu live after a forward pass."""
    run, batches = make_run(recompute)
    with ResultCounter("gelu") as counter:
        output = run.model(batches[0][0])
    living = sum(one() is not None for one in counter.results)
    output.sum().backward()
    return living


def test_a_chain_is_computed_from_its_first_input() -> None:
    """Views, a changed result, and a result that is used twice."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    exp, sine = RecomputedCall(torch.exp), RecomputedCall(torch.sin)

    def compute(first: Any, second: Any) -> torch.Tensor:
        y = second(first(x))
        changed = second(x * 2).mul_(3)
        square = changed * changed
        return (y.t()[1:] * y.t()[:-1]).sum() + F.linear(y, weight).sum() + square.sum()

    want = torch.autograd.grad(compute(torch.exp, torch.sin), (x, weight))
    with recompute_results():
        total = compute(exp, sine)
    found = torch.autograd.grad(total, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_an_input_that_was_changed_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    with recompute_results():
        y = x * 2
        z = RecomputedCall(torch.sin)(y)
        y.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place"):
        z.sum().backward()


@pytest.mark.parametrize(
    ("operators", "options", "text"),
    [
        ("blocks.*.tanh", {}, r"'blocks.\*.tanh' matches no operator"),
        ("drop.dropout", {}, "it draws random numbers"),
        ("blocks.*.flatten", {}, "its result takes no memory"),
        ("blocks.0.gelu", {"strategy": None}, r"without strategy=pdrun.Operators"),
        ("blocks.0.gelu", {"offload": "activations"}, "with activations on the host"),
        ("blocks.0.gelu", {"compile": {"backend": "eager"}}, "with compile="),
    ],
)
def test_what_cannot_be_recomputed_is_refused(
    worlds: Any, operators: str, options: dict[str, Any], text: str
) -> None:
    assert worlds(1).run(refused, {"operators": operators}, options, text) == [True]


def refused(recompute: Any, options: dict[str, Any], text: str) -> bool:
    if "strategy" in options:
        with pytest.raises(UsageError, match=text):
            parallelize(
                Net(), lambda params: torch.optim.SGD(params, 0.5), loss, recompute=recompute
            )
        return True
    with pytest.raises(UsageError, match=text):
        make_run(recompute, **options)
    return True


def test_an_operator_of_a_recomputed_module_is_refused(worlds: Any) -> None:
    both = {"modules": "blocks.*", "operators": "blocks.0.gelu"}
    assert worlds(1).run(refused, both, {}, "its module is recomputed already") == [True]
