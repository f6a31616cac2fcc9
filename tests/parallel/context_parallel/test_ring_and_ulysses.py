"""
Ring and Ulysses attention: outputs and gradients of whole sequences, on real ranks; what goes over
the network.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from pdrun.errors import UsageError
from pdrun.parallel.comm.axis_transport import PendingTensor
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.context_parallel import block_attention as block_attention
from pdrun.parallel.context_parallel.ring import ring_attention
from pdrun.parallel.context_parallel.ulysses import ulysses_attention
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.sequence_order import (
    ORDERS,
    attention_blocks,
    count_positions,
    positions_of,
    positions_within,
)
from tests.parallel.comm.test_collectives import axes_of

pytestmark = pytest.mark.torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


# ---- which positions, which blocks ------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6), st.sampled_from(ORDERS))
def test_parts_are_all_of_a_sequence(length: int, parts: int, order: str) -> None:
    found = [positions_of(length, parts, index, order) for index in range(parts)]
    assert sorted(
        place for ranges in found for low, high in ranges for place in range(low, high)
    ) == [*range(length)]
    sizes = [count_positions(ranges) for ranges in found]
    assert max(sizes) - min(sizes) <= 2
    for ranges in found:
        assert list(ranges) == sorted(ranges)


@given(st.integers(0, 30), st.integers(1, 5), st.sampled_from(ORDERS), st.booleans(), st.data())
def test_blocks_are_each_pair_once(
    length: int, parts: int, order: str, causal: bool, data: Any
) -> None:
    q, k = (
        positions_of(length, parts, data.draw(st.integers(0, parts - 1)), order) for _ in range(2)
    )
    found: dict[tuple[int, int], int] = {}
    for block in attention_blocks(q, k, causal):
        rows = [place for low, high in positions_within(q, *block.q) for place in range(low, high)]
        columns = [
            place for low, high in positions_within(k, *block.k) for place in range(low, high)
        ]
        for i, row in enumerate(rows):
            for column in columns[: i + 1] if block.causal else columns:
                found[row, column] = found.get((row, column), 0) + 1
    rows, columns = (
        [place for low, high in ranges for place in range(low, high)] for ranges in (q, k)
    )
    assert found == {
        (row, column): 1 for row in rows for column in columns if column <= row or not causal
    }


def test_zigzag_gives_every_rank_the_same_to_do() -> None:
    """
    Three blocks of the same size a rank and step, merged into one call; the contiguous order skips
    or fills.
    """
    parts = [positions_of(64, 4, index, "zigzag") for index in range(4)]
    for me in range(4):
        for other in range(4):
            found = attention_blocks(parts[me], parts[other], True)
            assert len(found) == 1
            size = (found[0].q[1] - found[0].q[0]) * (found[0].k[1] - found[0].k[0])
            assert size == (256 if me == other else 128)  # the causal one is half empty
    assert (
        attention_blocks(
            positions_of(64, 4, 0, "contiguous"), positions_of(64, 4, 3, "contiguous"), True
        )
        == ()
    )


# ---- against whole sequences ------------------------------------------------


def _case(
    length: int, heads: int, key_heads: int, kind: torch.dtype, mask: str
) -> dict[str, torch.Tensor]:
    """Return the inputs of a whole attention, and the gradient of its output."""
    source = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(kind)

    found = {
        "q": draw(2, heads, length, 8),
        "k": draw(2, key_heads, length, 8),
        "v": draw(2, key_heads, length, 8),
    }
    found["grad"] = draw(2, heads, length, 8)
    if mask == "bias":
        found["mask"] = draw(heads, length, length)
    elif mask == "bool":
        found["mask"] = draw(2, 1, length, length) > 0
    elif mask == "keys":
        found["mask"] = draw(2, 1, 1, length) > -0.5
    return found


def _reference(case: dict[str, torch.Tensor], causal: bool) -> dict[str, torch.Tensor]:
    """Return output and gradients of plain attention, in fp64."""
    leaves = {name: case[name].double().requires_grad_() for name in ("q", "k", "v")}
    bias = case.get("mask")
    if bias is not None and bias.dtype != torch.bool:
        bias = leaves["mask"] = bias.double().requires_grad_()
    if causal:
        length = case["q"].shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        bias = (
            seen
            if bias is None
            else bias & seen
            if bias.dtype == torch.bool
            else bias.masked_fill(~seen, -torch.inf)
        )
    out = scaled_dot_product_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        bias,
        enable_gqa=leaves["q"].shape[1] != leaves["k"].shape[1],
    )
    out.backward(case["grad"].double())
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _take(x: torch.Tensor, ranges: Any, dim: int) -> torch.Tensor:
    return torch.cat(
        [x.narrow(dim, low, high - low) for low, high in ranges] or [x.narrow(dim, 0, 0)], dim
    )


def compare(
    method: str,
    length: int,
    heads: int,
    key_heads: int,
    order: str,
    causal: bool,
    kind: torch.dtype,
    mask: str = "",
) -> dict[str, tuple[int, int]]:
    """
    Hold one rank's part of an attention and its gradients against the whole; return what was
    counted.
    """
    axis = axes_of(Grid(("cp",), (torch.distributed.get_world_size(),)))["cp"]
    case = _case(length, heads, key_heads, kind, mask)
    mine = positions_of(length, axis.size, axis.index, order)
    leaves = {name: _take(case[name], mine, 2).clone().requires_grad_() for name in ("q", "k", "v")}
    given = case.get("mask")
    if given is not None:
        given = given if given.shape[-2] == 1 else _take(given, mine, given.dim() - 2).clone()
        if given.dtype != torch.bool:
            leaves["mask"] = given.requires_grad_()
    if method == "ring":
        out = ring_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            axis,
            length=length,
            order=order,
            causal=causal,
            mask=given,
        )
    else:
        out = ulysses_attention(
            leaves["q"], leaves["k"], leaves["v"], axis, length=length, causal=causal, mask=given
        )
    out.backward(_take(case["grad"], mine, 2))
    wanted = _reference(case, causal)
    assert out.dtype == kind
    for name, found in {"out": out, **{name: leaf.grad for name, leaf in leaves.items()}}.items():
        whole = wanted[name]
        target = _take(whole, mine, whole.dim() - 2) if whole.shape[-2] == length else whole
        assert found is not None
        scale = max(1.0, float(target.abs().max())) if target.numel() else 1.0
        worst = float((found.double() - target).abs().max()) if target.numel() else 0.0
        assert worst <= TOLERANCE[kind] * scale, (name, worst)
    return {str(key): (count.calls, count.nbytes) for key, count in axis.state.counts.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (2, 7), (3, 17), (4, 32), (4, 21), (4, 3)])
def test_a_ring_is_plain_attention(
    worlds: Any, ranks: int, length: int, order: str, causal: bool
) -> None:
    worlds(ranks).run(compare, "ring", length, 4, 4, order, causal, torch.float64)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_ring_in_other_types_with_grouped_queries(
    worlds: Any, key_heads: int, kind: torch.dtype
) -> None:
    worlds(3).run(compare, "ring", 20, 4, key_heads, "zigzag", True, kind)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["bias", "bool", "keys"])
def test_a_ring_with_a_mask(worlds: Any, mask: str, causal: bool) -> None:
    worlds(3).run(compare, "ring", 13, 4, 2, "zigzag", causal, torch.float64, mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("ranks", "length", "key_heads"), [(2, 8, 4), (2, 7, 2), (2, 9, 1), (4, 22, 4), (4, 3, 2)]
)
def test_ulysses_is_plain_attention(
    worlds: Any, ranks: int, length: int, key_heads: int, causal: bool
) -> None:
    worlds(ranks).run(compare, "ulysses", length, 4, key_heads, "contiguous", causal, torch.float64)


@pytest.mark.parametrize("mask", ["bias", "bool", "keys"])
def test_ulysses_with_a_mask(worlds: Any, mask: str) -> None:
    worlds(2).run(compare, "ulysses", 9, 4, 2, "contiguous", False, torch.float32, mask)


def under_autocast() -> None:
    """Hold a ring under autocast against torch's attention there."""
    axis = axes_of(Grid(("cp",), (torch.distributed.get_world_size(),)))["cp"]
    case, mine = (
        _case(12, 4, 4, torch.float32, ""),
        positions_of(12, axis.size, axis.index, "zigzag"),
    )
    with torch.autocast("cpu", torch.bfloat16):
        whole = scaled_dot_product_attention(case["q"], case["k"], case["v"], is_causal=True)
        q, k, v = (_take(case[name], mine, 2).requires_grad_() for name in ("q", "k", "v"))
        found = ring_attention(q, k, v, axis, causal=True)
    found.sum().backward()
    assert found.dtype == whole.dtype == torch.bfloat16
    assert q.grad is not None and q.grad.dtype == torch.float32
    torch.testing.assert_close(found, _take(whole, mine, 2), rtol=0.03, atol=0.03)


def test_a_ring_under_autocast_has_the_type_of_torchs_attention(worlds: Any) -> None:
    worlds(2).run(under_autocast)


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_kernels_of_accelerators_take_what_they_are_given(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without data: names, order and shapes of their arguments and results."""
    monkeypatch.setattr(block_attention, "_choose_kernel", lambda *args: kind)
    q, k = (torch.empty(2, 4, n, 8, dtype=torch.bfloat16, device="meta") for n in (5, 7))
    k = k[:, :2]
    out, lse = block_attention.attend_block(q, k, k, False, 0.3, block_attention.ScoreTerms())
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    done = block_attention.AttentionResult(torch.empty_like(q), out, lse)
    dq, dk, dv, scores = block_attention.attend_block_backward(
        done, q, k, k, False, 0.3, block_attention.ScoreTerms()
    )
    assert (dq.shape, dk.shape, dv.shape, scores) == (q.shape, k.shape, k.shape, None)


# ---- bytes ------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_shifts_keys_and_values(worlds: Any, ranks: int) -> None:
    """
    n - 1 shifts of K and V forward; in the backward once more, and n - 1 of their gradients, in
    fp32.
    """
    length, heads, size, batch = 8 * ranks, 4, 8, 2
    for kind, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        both = 2 * batch * heads * (length // ranks) * size
        for found in worlds(ranks).run(compare, "ring", length, heads, heads, "zigzag", True, kind):
            assert found == {
                "('shift', ('cp',))": (3 * (ranks - 1), (ranks - 1) * both * (2 * width + 4))
            }


def test_ulysses_swaps_four_times_each_way(worlds: Any) -> None:
    length, heads, size, batch, ranks = 16, 4, 8, 2, 4
    one = batch * heads * (length // ranks) * size * 4
    for found in worlds(ranks).run(
        compare, "ulysses", length, heads, heads, "contiguous", True, torch.float32
    ):
        assert found == {"('all_to_all', ('cp',))": (8, 8 * one)}


# ---- overlap ----------------------------------------------------------------


def travels() -> list[str]:
    """
    Return in which order one rank starts shifts, computes blocks and waits, forward and backward.
    """
    axis = axes_of(Grid(("cp",), (torch.distributed.get_world_size(),)))["cp"]
    said: list[str] = []

    def saying(word: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            said.append(word)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AxisGroup, "start_shift", saying("send", AxisGroup.start_shift))
        patch.setattr(PendingTensor, "wait", saying("wait", PendingTensor.wait))
        patch.setattr(
            block_attention, "attend_block", saying("forward", block_attention.attend_block)
        )
        patch.setattr(
            block_attention,
            "attend_block_backward",
            saying("backward", block_attention.attend_block_backward),
        )
        q = torch.randn(1, 2, 4, 8, requires_grad=True)
        ring_attention(q, q, q, axis).sum().backward()
    return said


def test_a_ring_computes_while_keys_and_values_travel(worlds: Any) -> None:
    for said in worlds(3).run(travels):
        assert said[:8] == ["send", "forward", "wait", "send", "forward", "wait", "forward", "send"]
        assert said[8:] == [
            "backward",
            "wait",
            "send",
            "backward",
            "wait",
            "send",
            "backward",
            "wait",
            "send",
            "wait",
        ]


# ---- refused ----------------------------------------------------------------


def refused(method: str, heads: int, key_heads: int, length: int | None) -> str:
    """Return what an attention says that can't be computed."""
    axis = axes_of(Grid(("cp",), (torch.distributed.get_world_size(),)))["cp"]
    q, k = torch.zeros(1, heads, 4, 8), torch.zeros(1, key_heads, 4, 8)
    try:
        (ring_attention if method == "ring" else ulysses_attention)(q, k, k, axis, length=length)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "heads", "key_heads", "length", "said"),
    [
        ("ulysses", 3, 3, None, "3 heads of queries do not divide over 2 ranks along cp"),
        ("ulysses", 6, 3, None, ""),
        ("ulysses", 6, 6, None, ""),
        (
            "ulysses",
            2,
            4,
            None,
            "4 heads of keys, 1 times each, do not divide 2 heads of queries over 2 ranks along cp",
        ),
        ("ring", 3, 2, None, "3 heads of queries over 2 of keys and 2 of values"),
        ("ring", 2, 2, 20, "q has 4 positions; this rank's part of 20 is 10"),
    ],
)
def test_what_does_not_fit_is_refused(
    worlds: Any, method: str, heads: int, key_heads: int, length: int | None, said: str
) -> None:
    told = worlds(2).run(refused, method, heads, key_heads, length)[0]
    assert (said in told) if said else told == ""
