"""Products in fp8 against fp32, on the values that fp8 has trouble with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pdrun.parallel.fp8 import product
from tests.parallel.fp8.kinds import SCALES

pytestmark = pytest.mark.torch
E4M3, E5M2 = 2.0**-4, 2.0**-3
"""The largest relative error of a value."""


def difference(mine: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the expected norm."""
    return float((mine.float() - expected.float()).norm() / expected.float().norm())


def grads_of(function: object, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the output of a function and the gradients of its tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = function(*leaves)  # type: ignore[operator]
    return (y, *torch.autograd.grad(y, leaves, grad.to(y.dtype)))


@pytest.mark.parametrize("rows", [32, 7], ids=["aligned rows", "7 rows"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", SCALES)
def test_products_are_those_of_fp32_to_the_rounding_of_fp8(
    scales: str, kind: torch.dtype, rows: int
) -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows, 64, generator=dice).bfloat16()
    weight = 0.02 * torch.randn(48, 64, generator=dice)
    bias = torch.randn(48, generator=dice)
    grad = 1e-6 * torch.randn(2, rows, 48, generator=dice)
    tensors = x, weight.to(kind), bias.to(kind)
    found = grads_of(lambda x, w, b: product.linear(x, w, b, scales), tensors, grad)
    expected = grads_of(F.linear, tuple(one.float() for one in tensors), grad)
    to_weight = E5M2 if scales == "tensor" and rows == 32 else 0.01
    to_x = E5M2 if scales == "tensor" else E4M3
    limits = (E4M3, to_x, to_weight, 0.01)
    for place, (mine, want, limit) in enumerate(zip(found, expected, limits, strict=True)):
        assert difference(mine, want) < limit, place
    assert [one.dtype for one in found] == [torch.bfloat16, torch.bfloat16, kind, kind]
    exact = grads_of(F.linear, tensors[:1] + tuple(one.bfloat16() for one in tensors[1:]), grad)
    assert difference(found[0], exact[0]) > 0.005  # it was multiplied in fp8


def test_rows_of_other_sizes_have_scales_of_their_own() -> None:
    """A scale per tensor drops a row that is 2**-30 of another one; a scale per row does not."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[5] *= 2.0**-30
    weight = torch.eye(64).bfloat16()
    assert product.linear(x, weight, None, "tensor")[5].abs().max() == 0
    factor = product.find_factor(x, torch.float8_e4m3fn, -1)
    narrow = product.cast(x, factor, torch.float8_e4m3fn).float() / factor
    assert difference(narrow[5], x[5]) < E4M3


def test_a_cast_of_a_part_is_the_part_of_a_cast() -> None:
    """Factors are powers of two: what one rank casts of a tensor has the same values."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 100.0
    values = []
    for part in (x, x[32:]):
        factor = product.find_factor(part, torch.float8_e4m3fn, None)
        assert float(factor) == 2.0 ** round(float(factor.log2()))
        values.append(product.cast(part, factor, torch.float8_e4m3fn).float() / factor)
    large = x[32:].abs() > 2.0**-8 * 100.0 / 448 * 64
    assert torch.equal(values[0][32:][large], values[1][large])


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("value", [1.0, 447.9, 1e-38, 3e38, 0.0, 2.0**-126])
def test_a_cast_never_overflows(value: float, kind: torch.dtype) -> None:
    x = torch.full((16, 16), value).bfloat16()
    factor = product.find_factor(x, kind, None)
    narrow = product.cast(x, factor, kind).float()
    assert torch.isfinite(factor) and torch.isfinite(narrow).all()
    assert narrow.abs().max() <= torch.finfo(kind).max
    if value > 1e-30:
        assert narrow.abs().max() > torch.finfo(kind).max / 2.3


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(value: float, scales: str) -> None:
    x = torch.ones(16, 16).bfloat16()
    x[3, 3] = value
    assert not torch.isfinite(product.linear(x, torch.ones(16, 16).bfloat16(), None, scales)).all()


@pytest.mark.parametrize("scales", SCALES)
def test_zeros_and_no_rows(scales: str) -> None:
    weight = torch.zeros(32, 16).bfloat16().requires_grad_()
    bias = torch.ones(32)
    for rows in (0, 16):
        x = torch.zeros(rows, 16, dtype=torch.bfloat16, requires_grad=True)
        y = product.linear(x, weight, bias, scales)
        assert y.shape == (rows, 32) and (y == 1).all() and y.dtype == torch.bfloat16
        for grad in torch.autograd.grad(y.sum(), (x, weight)):
            assert (grad == 0).all()


def test_what_needs_no_gradient_is_not_computed() -> None:
    x = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
    frozen = torch.ones(16, 16, dtype=torch.bfloat16)
    assert torch.autograd.grad(product.linear(x, frozen, None, "tensor").sum(), x)[0].eq(16).all()


def test_compiled_products_are_one_graph_with_the_same_results() -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(32, 32, generator=dice).bfloat16()
    weight = torch.randn(16, 32, generator=dice).bfloat16()
    grad = torch.randn(32, 16, generator=dice)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return product.linear(F.silu(x), weight, None, "tensor")

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, want in zip(
        grads_of(compiled, (x, weight), grad), grads_of(function, (x, weight), grad), strict=True
    ):
        assert torch.equal(mine, want)
