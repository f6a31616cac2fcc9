"""
Collectives of hand-written programs: values and gradients in fp64 against one process that computes
the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel import collectives
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

Reference = Callable[[list[Tensor]], list[Tensor]]


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def cut(x: Tensor, count: int, dim: int) -> list[Tensor]:
    return list(torch.tensor_split(x, count, dim))


def transposed(xs: list[Tensor]) -> list[Tensor]:
    """All-to-all by hand: dim 0 is cut, dim 1 is concatenated."""
    parts = [cut(x, len(xs), 0) for x in xs]
    return [torch.cat([part[rank] for part in parts], 1) for rank in range(len(xs))]


def halos(xs: list[Tensor]) -> list[Tensor]:
    """Each rank has the last row of the rank before it and the first of the one after it."""
    found = []
    for rank, x in enumerate(xs):
        rows = [x]
        if rank:
            rows.insert(0, xs[rank - 1][-1:])
        if rank + 1 < len(xs):
            rows.append(xs[rank + 1][:1])
        found.append(torch.cat(rows))
    return found


def exchange_halos(x: Tensor, ranks: Any) -> Tensor:
    before, after = ranks.index - 1, ranks.index + 1
    outgoing, incoming = {}, {}
    if before >= 0:
        outgoing[before], incoming[before] = x[:1], x[:1]
    if after < ranks.size:
        outgoing[after], incoming[after] = x[-1:], x[-1:]
    got = collectives.exchange(outgoing, incoming, ranks)
    rows = [got[before]] if before >= 0 else []
    return torch.cat([*rows, x, *([got[after]] if after < ranks.size else [])])


def send_onwards(x: Tensor, ranks: Any) -> Tensor:
    """Rank 0 sends to the last rank, which returns what it got times its own."""
    if ranks.index == 0:
        return x + collectives.send(x, ranks.size - 1, ranks)
    if ranks.index == ranks.size - 1:
        return x * collectives.receive(x, 0, ranks)
    return x * 1


def extremes(xs: list[Tensor]) -> list[Tensor]:
    return [torch.stack(xs).amax(0)] * len(xs)


CASES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Reference]] = {
    "all_reduce": (collectives.all_reduce, lambda xs: [total(xs)] * len(xs)),
    "mean": (
        lambda x, ranks: collectives.all_reduce(x, ranks, "mean"),
        lambda xs: [total(xs) / len(xs)] * len(xs),
    ),
    "max": (lambda x, ranks: collectives.all_reduce(x, ranks, "max"), extremes),
    "min": (
        lambda x, ranks: collectives.all_reduce(x, ranks, "min"),
        lambda xs: [-each for each in extremes([-x for x in xs])],
    ),
    "all_gather": (
        lambda x, ranks: collectives.all_gather(x, ranks, dim=1),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
    ),
    "reduce_scatter": (collectives.reduce_scatter, lambda xs: cut(total(xs), len(xs), 0)),
    "all_to_all": (lambda x, ranks: collectives.all_to_all(x, ranks, 0, 1), transposed),
    "broadcast": (
        lambda x, ranks: collectives.broadcast(x, ranks, ranks.size - 1),
        lambda xs: [xs[-1]] * len(xs),
    ),
    "reduce": (
        lambda x, ranks: collectives.reduce(x, ranks, 1 % ranks.size),
        lambda xs: [
            total(xs) if rank == 1 % len(xs) else torch.zeros_like(x) for rank, x in enumerate(xs)
        ],
    ),
    "shift": (
        lambda x, ranks: collectives.shift(x, ranks, 1),
        lambda xs: [xs[rank - 1] for rank in range(len(xs))],
    ),
    "exchange": (exchange_halos, halos),
}
ACROSS = {
    "send": (
        send_onwards,
        lambda xs: [*xs[:-1], xs[-1] * xs[0]],
    ),
}


def input_of(rank: int, has_ties: bool = False) -> Tensor:
    torch.manual_seed(rank)
    x = torch.randn(5, 3, dtype=torch.float64)
    return x.round() if has_ties else x


def weight_of(rank: int, y: Tensor) -> Tensor:
    return torch.arange(y.numel(), dtype=y.dtype).view_as(y).sin() + rank


def run_case(name: str, choose: str) -> tuple[Tensor, Tensor, int, int]:
    """Return this rank's result and gradient, its index and the group's size."""
    function = {**CASES, **ACROSS}[name][0]
    rank = torch.distributed.get_rank()
    if choose == "mesh":
        ranks = collectives.group("tp", pdrun.mesh(dp=-1, tp=2))
    elif choose == "ranks":
        ranks = collectives.group(ranks=(3, 0) if rank in (0, 3) else (1, 2))
    else:
        ranks = collectives.group()
    x = input_of(ranks.index, has_ties=name in ("max", "min")).requires_grad_()
    y = function(x, ranks)
    (y * weight_of(ranks.index, y)).sum().backward()
    collectives.barrier(ranks)
    assert x.grad is not None
    return y.detach(), x.grad, ranks.index, ranks.size


@pytest.mark.parametrize("choose", ["all", "mesh", "ranks"])
@pytest.mark.parametrize("name", [*CASES, *ACROSS])
def test_values_and_gradients_are_those_of_one_process(
    name: str, choose: str, worlds: Worlds
) -> None:
    results = worlds(4).run(run_case, name, choose)
    size = results[0][3]
    xs = [
        input_of(index, has_ties=name in ("max", "min")).requires_grad_() for index in range(size)
    ]
    ys = {**CASES, **ACROSS}[name][1](xs)
    torch.stack([(y * weight_of(index, y)).sum() for index, y in enumerate(ys)]).sum().backward()
    for y, grad, index, _ in results:
        torch.testing.assert_close(y, ys[index].detach(), rtol=1e-12, atol=1e-12)
        right = xs[index].grad
        if right is None:  # of a tensor that nobody uses
            right = torch.zeros_like(grad)
        torch.testing.assert_close(grad, right, rtol=1e-12, atol=1e-12)


def alone() -> list[bool]:
    x = input_of(0)
    return [
        torch.equal(function(x, collectives.group(ranks=[torch.distributed.get_rank()])), x)
        for name, (function, _) in CASES.items()
    ]


def test_a_group_of_one_returns_the_tensor(worlds: Worlds) -> None:
    assert all(all(found) for found in worlds(2).run(alone))


def uneven() -> tuple[Tensor, Tensor]:
    """Gather 7 rows that 4 ranks have as ``tensor_split`` cuts them, and scatter them again."""
    rows = torch.arange(7.0, dtype=torch.float64)
    mine = cut(rows, 4, 0)[torch.distributed.get_rank()]
    return collectives.all_gather(mine, total=7), collectives.reduce_scatter(rows) / 4


def test_parts_may_differ_by_one_row(worlds: Worlds) -> None:
    rows = torch.arange(7.0, dtype=torch.float64)
    for rank, (gathered, part) in enumerate(worlds(4).run(uneven)):
        assert torch.equal(gathered, rows)
        assert torch.equal(part, cut(rows, 4, 0)[rank])


def integers() -> tuple[Tensor, bool]:
    x = torch.full((2,), torch.distributed.get_rank())
    y = collectives.exchange({(x[0].item() + 1) % 2: x}, {(x[0].item() + 1) % 2: x})
    return next(iter(y.values())), next(iter(y.values())).requires_grad


def test_integers_are_sent_without_gradients(worlds: Worlds) -> None:
    for rank, (received, has_grad) in enumerate(worlds(2).run(integers)):
        assert received.tolist() == [1 - rank] * 2
        assert not has_grad


def wrong(kind: str) -> None:
    x = torch.ones(2)
    mesh = pdrun.mesh(dp=-1)
    calls: dict[str, Callable[[], object]] = {
        "op": lambda: collectives.all_reduce(x, op="product"),
        "axis": lambda: collectives.group("tq", mesh),
        "no mesh": lambda: collectives.group("dp"),
        "both": lambda: collectives.group("dp", mesh, ranks=[0]),
        "twice": lambda: collectives.group(ranks=[0, 0, 1]),
        "beyond": lambda: collectives.group(ranks=[0, 1, 2]),
        "not mine": lambda: collectives.group(ranks=[1 - torch.distributed.get_rank()]),
        "index": lambda: collectives.broadcast(x, source=2),
        "self": lambda: collectives.exchange({torch.distributed.get_rank(): x}, {}),
    }
    calls[kind]()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("op", "op must be sum, mean, max or min, got 'product'"),
        ("axis", "has no axis 'tq'"),
        ("no mesh", "axes and mesh= belong together"),
        ("both", "ranks= replaces axes and mesh"),
        ("twice", "are not different ranks of 2"),
        ("beyond", "are not different ranks of 2"),
        ("not mine", "is not one of"),
        ("index", "index 2 is not one of the group's 2 ranks"),
        ("self", "must send and receive its own tensor, or neither"),
    ],
)
def test_mistakes_are_named(kind: str, text: str, worlds: Worlds) -> None:
    for found, message in worlds(2).failures(wrong, kind):
        assert found == UsageError.__name__
        assert text in message
