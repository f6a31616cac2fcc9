"""
Products beside collectives: on real ranks against products of whole tensors, and where a compiled
graph has them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pdrun.parallel.comm import custom_ops
from pdrun.parallel.comm import overlapped_matmul as products
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.p2p import cuda_driver
from pdrun.parallel.comm.p2p import exchanges as peers
from pdrun.parallel.compiler import matmul_pass
from pdrun.parallel.compiler.overlap_pass import OVERLAP_PASS
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import shard_range
from tests.parallel.comm.test_collectives import axes_of
from tests.parallel.compiler.test_overlap_pass import ATEN, OURS, TWO, Draft

pytestmark = pytest.mark.torch


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- on real ranks ----------------------------------------------------------

SHAPES = [
    ((5, 12, 4), 1),
    ((5, 12, 4), 0),
    ((12, 4), 0),
    ((1, 6, 4), 1),
    ((2, 3, 12, 4), 2),
    ((3, 7, 4), 1),
    ((7, 4), 0),
]
"""Of what is gathered or summed up, and the dim; 5 and 7 do not divide among the ranks."""


class Late:
    """What comes when it is waited for."""

    def __init__(self, out: torch.Tensor, value: torch.Tensor) -> None:
        self._out, self._value = out, value

    def wait(self) -> None:
        self._out.copy_(self._value)


def gathering(shape: tuple[int, ...], dim: int, late: bool) -> None:
    axis = axes_of(Grid(("tp",), (torch.distributed.get_world_size(),)))["tp"]
    whole = drawn(*shape, seed=1)
    low, high = shard_range(shape[dim], axis.size, axis.index)
    mine = whole.narrow(dim, low, high - low).contiguous()
    weights = [drawn(6, 4, seed=2).t(), drawn(4, 3, seed=3)]
    with axis.state.deferring() as started:
        out = axis.all_gather(mine, dim, shape[dim])
    coming = started[0] if started else None
    if late:  # whoever reads it before the wait will show
        out = torch.full_like(whole, float("nan"))
        coming = Late(out, whole)  # type: ignore[assignment]
    found = products.all_gather_matmul(axis, mine, out, dim, weights, coming)
    for weight, result in zip(weights, found, strict=True):
        torch.testing.assert_close(result, whole.flatten(0, -2) @ weight)
        assert result.is_contiguous()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("late", [False, True])
def test_products_of_what_is_gathered(
    worlds: Any, world: int, shape: tuple[int, ...], dim: int, late: bool
) -> None:
    worlds(world).run(gathering, shape, dim, late)


class Sent:
    """
    A sum whose parts go through gloo: which parts there are, and where they belong, is the same as
    with devices.
    """

    def __init__(self, axis: Any, out: torch.Tensor, part: Callable[[int], torch.Tensor]) -> None:
        order = [place % axis.size for place in range(axis.index + 1, axis.index + axis.size + 1)]
        self._parts = {place: part(place).clone() for place in order}
        self._axis, self._out = axis, out

    def wait(self) -> None:
        parts = [self._parts[place] for place in range(self._axis.size)]
        came = self._axis.all_to_all_lists(parts, [tuple(self._out.shape)] * self._axis.size)
        self._out.copy_(torch.stack(came).sum(0))


def scattering(shape: tuple[int, ...], dim: int, reaching: bool, open_size: bool) -> None:
    axis = axes_of(Grid(("tp",), (torch.distributed.get_world_size(),)))["tp"]
    if reaching:
        axis.find_copier = lambda part: axis  # type: ignore[method-assign,assignment,return-value]
        products.P2PReduceScatter = Sent  # type: ignore[misc,assignment]
    rows = torch.Size(shape[:-1]).numel()
    try:
        sums, pairs = [], []
        for place in range(axis.size):
            inputs = [drawn(rows, width, seed=10 * place + width) for width in (4, 6)]
            weights = [drawn(shape[-1], width, seed=20 * place + width).t() for width in (4, 6)]
            pairs.append((inputs, weights))
            sums.append(
                sum(x @ weight for x, weight in zip(inputs, weights, strict=True)).view(shape)
            )
        said = [-1, *shape[1:]] if open_size else list(shape)
        found = products.matmul_reduce_scatter(axis, *pairs[axis.index], said, dim)
    finally:
        products.P2PReduceScatter = peers.P2PReduceScatter  # type: ignore[misc]
    low, high = shard_range(shape[dim], axis.size, axis.index)
    torch.testing.assert_close(found, torch.stack(sums).sum(0).narrow(dim, low, high - low))
    (count,) = [count for (name, _), count in axis.state.counts.items() if name == "reduce_scatter"]
    assert (count.calls, count.nbytes) == (1, rows * shape[-1] * 8)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("reaching", [False, True])
def test_products_that_are_added_up(
    worlds: Any, world: int, shape: Any, dim: int, reaching: bool
) -> None:
    worlds(world).run(scattering, shape, dim, reaching, open_size=dim == 1)


def test_a_pitched_copy_is_laid_out_as_cuda_has_it() -> None:
    """CUDA_MEMCPY2D of cuda.h, on 64 bits."""
    places = {
        name: getattr(cuda_driver._Memcpy2D, name).offset
        for name, _ in cuda_driver._Memcpy2D._fields_
    }
    assert places["from_kind"] == 16 and places["from_device"] == 32 and places["from_pitch"] == 48
    assert places["to_kind"] == 72 and places["to_device"] == 88 and places["to_pitch"] == 104
    assert (places["width"], places["rows"], ctypes.sizeof(cuda_driver._Memcpy2D)) == (
        112,
        120,
        128,
    )


# ---- in a graph -------------------------------------------------------------


class Sized(Draft):
    """A graph of tensors of which the shapes are said."""

    def put(self, target: Any, *args: Any, shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def weight(self, name: str, rows: int, columns: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(columns, rows, device="meta")
        return self.put(ATEN.permute.default, node, [1, 0], shape=(rows, columns))


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_pass, "is_worth_splitting", lambda node: True)


def gathered(draft: Sized, bias: bool = False) -> tuple[fx.Node, list[fx.Node]]:
    x = draft.input("x")
    x.meta["val"] = torch.empty(3, 4, 8, device="meta")
    row = draft.input("row")
    row.meta["val"] = torch.empty(6, device="meta")
    weights = [draft.weight(name, 8, 6) for name in "wv"]
    whole = draft.put(OURS.all_gather.default, x, TWO, 1, None, shape=(3, 8, 8))
    rows = draft.put(ATEN.reshape.default, whole, [24, 8], shape=(24, 8))
    target, more = (ATEN.addmm.default, (row,)) if bias else (ATEN.mm.default, ())
    return whole, [draft.put(target, *more, rows, weight, shape=(24, 6)) for weight in weights]


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("bias", [False, True])
def test_products_begin_before_what_they_read_has_come(bias: bool) -> None:
    draft = Sized()
    _, made = gathered(draft, bias)
    late = draft.put(ATEN.mul.Tensor, made[1], 2.0, shape=(24, 6))
    found = draft.ordered(made[0], late)
    assert "mm" not in found and "addmm" not in found
    assert found.index("start_all_gather") < found.index("all_gather_matmul") < found.index("wait")
    assert found.count("add") == (2 if bias else 0)
    (joint,) = [
        node for node in draft.graph.nodes if node.target is custom_ops.ALL_GATHER_MATMUL_OP
    ]
    assert [weight.target for weight in joint.args[4]] == [ATEN.permute.default] * 2
    (wait,) = [node for node in draft.graph.nodes if node.target is custom_ops.WAIT_OP]
    assert {node.args[0] for node in wait.args[1] if node.op == "call_function"} == {joint}


@pytest.mark.usefixtures("every")
def test_a_weight_is_brought_forward() -> None:
    """Its view may stand behind the first use of what is gathered."""
    draft = Sized()
    x = draft.input("x")
    x.meta["val"] = torch.empty(3, 4, 8, device="meta")
    w = draft.input("w")
    w.meta["val"] = torch.empty(6, 8, device="meta")
    whole = draft.put(OURS.all_gather.default, x, TWO, 1, None, shape=(3, 8, 8))
    rows = draft.put(ATEN.view.default, whole, [24, 8], shape=(24, 8))
    weight = draft.put(ATEN.permute.default, w, [1, 0], shape=(8, 6))
    made = draft.put(ATEN.mm.default, rows, weight, shape=(24, 6))
    found = draft.ordered(made)
    assert found.index("permute") < found.index("all_gather_matmul") < found.index("wait")


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize(
    "why", ["a computed weight", "the right side", "along the features", "too small"]
)
def test_products_that_stay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "too small":
        monkeypatch.undo()
    draft = Sized()
    x, w = draft.input("x"), draft.input("w")
    x.meta["val"], w.meta["val"] = (
        torch.empty(3, 4, 8, device="meta"),
        torch.empty(8, 6, device="meta"),
    )
    dim = 2 if why == "along the features" else 1
    whole = draft.put(
        OURS.all_gather.default, x, TWO, dim, None, shape=(3, 4, 16) if dim == 2 else (3, 8, 8)
    )
    rows = draft.put(ATEN.reshape.default, whole, [24, 8], shape=(24, 8))
    weight = draft.put(ATEN.mul.Tensor, w, 2.0, shape=(8, 6)) if why == "a computed weight" else w
    sides = (w, rows) if why == "the right side" else (rows, weight)
    made = draft.put(ATEN.mm.default, *sides, shape=(24, 6))
    assert "all_gather_matmul" not in draft.ordered(made)


def summed(draft: Sized, terms: int) -> tuple[fx.Node, list[fx.Node]]:
    made = []
    for number in range(terms):
        h = draft.input(f"h{number}")
        h.meta["val"] = torch.empty(24, 5, device="meta")
        product = draft.put(ATEN.mm.default, h, draft.weight(f"w{number}", 5, 8), shape=(24, 8))
        made.append(draft.put(ATEN.view.default, product, [3, 8, 8], shape=(3, 8, 8)))
    total = made[0]
    for more in made[1:]:
        total = draft.put(ATEN.add.Tensor, total, more, shape=(3, 8, 8))
    return total, made


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_sums_of_products_are_made_part_by_part(terms: int) -> None:
    draft = Sized()
    total, _ = summed(draft, terms)
    part = draft.put(OURS.reduce_scatter.default, total, TWO, 1, shape=(3, 4, 8))
    found = draft.ordered(part)
    assert not {"mm", "add", "view", "reduce_scatter"}.intersection(found)
    (joint,) = [
        node
        for node in draft.graph.nodes
        if node.target is OURS.start_matmul_reduce_scatter.default
    ]
    assert [len(joint.args[0]), joint.args[1], len(joint.args[2]), *joint.args[3:]] == [
        terms,
        TWO,
        terms,
        [3, 8, 8],
        1,
    ]
    (wait,) = [node for node in draft.graph.nodes if node.target is custom_ops.WAIT_OP]
    assert wait.args[1] == [*joint.args[0], *joint.args[2]], "what is read stays until then"


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize(
    "why", ["a product is used elsewhere", "the sum is", "a term is no product", "twice the same"]
)
def test_sums_that_stay(why: str) -> None:
    draft = Sized()
    total, made = summed(draft, 2)
    others = []
    if why == "a product is used elsewhere":
        others.append(draft.put(ATEN.mul.Tensor, made[0], 2.0, shape=(3, 8, 8)))
    if why == "the sum is":
        others.append(draft.put(ATEN.mul.Tensor, total, 2.0, shape=(3, 8, 8)))
    if why == "a term is no product":
        total = draft.put(ATEN.add.Tensor, total, 1.0, shape=(3, 8, 8))
    if why == "twice the same":
        total = draft.put(ATEN.add.Tensor, made[0], made[0], shape=(3, 8, 8))
    part = draft.put(OURS.reduce_scatter.default, total, TWO, 1, shape=(3, 4, 8))
    assert "start_matmul_reduce_scatter" not in draft.ordered(part, *others)


def test_the_pass_changes_no_result(worlds: Any) -> None:
    """
    A cut perceptron, forward and backward: graphs as torch.compile has them, with and without
    joined products.
    """
    for told in worlds(2).run(compiled, bound=240.0):
        assert told == ["all_gather_matmul", "matmul_reduce_scatter"] * 2


def compiled() -> list[str]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    axis = axes_of(Grid(("tp",), (2,)))["tp"]
    seen: list[str] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        fake = next(
            n.meta["val"].fake_mode
            for n in graph.graph.nodes
            if hasattr(n.meta.get("val"), "fake_mode")
        )
        with V.set_fake_mode(fake), config.patch(post_grad_custom_post_pass=OVERLAP_PASS):
            post_grad_passes(graph, False)
        names = [getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes]
        seen.extend(name.removeprefix("start_") for name in names if "matmul" in name)
        graph.recompile()
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    usual, matmul_pass.is_worth_splitting = matmul_pass.is_worth_splitting, lambda node: True
    try:
        results = [run(axis, backend), run(axis, None)]
    finally:
        matmul_pass.is_worth_splitting = usual
        torch._dynamo.reset()
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)
    return seen


def run(axis: AxisGroup, backend: Any) -> list[torch.Tensor]:
    from pdrun.parallel.comm import autograd as autograd

    def perceptron(
        x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        whole = autograd.all_gather_sum_grad(torch.tanh(x), axis, 1)
        h = torch.nn.functional.silu(
            torch.nn.functional.linear(whole, gate)
        ) * torch.nn.functional.linear(whole, up)
        return x + autograd.reduce_scatter(torch.nn.functional.linear(h, down), axis, 1)

    call = torch.compile(perceptron, backend=backend, fullgraph=True) if backend else perceptron
    x = drawn(3, 4, 8, seed=axis.index).requires_grad_()
    shapes = {"gate": (6, 8), "up": (6, 8), "down": (8, 6)}
    weights = [drawn(*shape, seed=7 + axis.index).requires_grad_() for shape in shapes.values()]
    y = call(x, *weights)
    (y * drawn(3, 4, 8, seed=30 + axis.index)).sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]
