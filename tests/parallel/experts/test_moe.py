"""`pdrun.MoE` in one process, against a loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.auto.flops import count_products
from pdrun.parallel.experts.grouped import ExpertRows, grouped_product, why_looped
from pdrun.parallel.experts.loads import StepLoads

pytestmark = pytest.mark.torch

DIM, HIDDEN, EXPERTS = 16, 24, 8


def build(seed: int = 0, **options: Any) -> pdrun.MoE:
    torch.manual_seed(seed)
    return pdrun.MoE(DIM, HIDDEN, experts=EXPERTS, **{"top_k": 2, **options})


def by_token(moe: pdrun.MoE, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts of each token add up to."""
    tokens = x.reshape(-1, DIM)
    out = []
    for n in range(len(tokens)):
        total = torch.zeros(DIM, dtype=x.dtype)
        for e, w in zip(index[n].tolist(), weights[n], strict=True):
            if e < EXPERTS:
                hidden = tokens[n] @ moe.up[e]
                gate, up = hidden.chunk(2)
                total = total + w * ((F.silu(gate) * up) @ moe.down[e])
        out.append(total)
    return torch.stack(out).view_as(x)


def choose(moe: pdrun.MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = (x.reshape(-1, DIM) @ moe.router.weight.T).softmax(-1)
    weights, index = scores.topk(2)
    return index, weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(dtype: torch.dtype) -> None:
    """fp32 is grouped_mm, fp64 the loop; the loss's gradient is an expanded tensor."""
    moe = build().to(dtype)
    x = torch.randn(3, 5, DIM, dtype=dtype, requires_grad=True)
    wanted = by_token(moe, x, *choose(moe, x))
    found = moe(x)
    torch.testing.assert_close(found, wanted)
    inputs = [x, *moe.parameters()]
    for mine, other in zip(
        torch.autograd.grad(found.sum(), inputs),
        torch.autograd.grad(wanted.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_an_expert_without_rows_has_a_gradient_of_zero_and_reads_nothing_foreign() -> None:
    moe = build()
    with torch.no_grad():
        moe.router.weight.copy_(torch.full((EXPERTS, DIM), -5.0))
        moe.router.weight[:2] = 5.0
    x = torch.rand(2, 4, DIM)
    moe(x).square().sum().backward()
    assert moe.up.grad is not None
    assert moe.up.grad[:2].abs().sum() > 0
    assert moe.up.grad[2:].abs().sum() == 0
    assert torch.isfinite(moe.up.grad).all()


def test_no_rows_at_all_give_gradients_of_zero() -> None:
    moe = build()
    out = moe(torch.zeros(0, 4, DIM))
    assert out.shape == (0, 4, DIM)
    out.sum().backward()
    assert moe.up.grad is not None and moe.up.grad.abs().sum() == 0


def test_rows_that_are_no_multiple_of_sixteen_bytes_are_a_loop() -> None:
    assert why_looped("cpu", torch.float32, (16, 24)) == ""
    assert "rows of 33 elements" in why_looped("cpu", torch.bfloat16, (16, 33))
    assert "float64" in why_looped("cpu", torch.float64, (16,))
    x, weight = torch.randn(6, 7), torch.randn(3, 7, 5)
    rows = ExpertRows(torch.tensor([2, 0, 4]))
    wanted = torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]])
    torch.testing.assert_close(grouped_product(x, weight, rows), wanted)


def test_groups_of_experts_limit_the_choice() -> None:
    """The experts of a token are those of its best groups, chosen as DeepSeek-V3 does."""
    moe = build(score="sigmoid", groups=(4, 1), normalize=False, scale=2.5)
    x = torch.randn(7, DIM)
    scores = (x @ moe.router.weight.T).sigmoid()
    group = scores.view(7, 4, 2).sum(-1).argmax(-1)
    index = torch.stack([2 * group, 2 * group + 1], 1)
    wanted = by_token(moe, x, index, scores.gather(1, index) * 2.5)
    torch.testing.assert_close(moe(x), wanted)


def test_capacity_drops_in_the_order_of_each_sequence() -> None:
    moe = build(top_k=1, capacity=1.0, normalize=False)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[0] = 1.0
    x = torch.rand(2, 16, DIM)
    found = moe(x)
    limit = 16 // EXPERTS
    assert (found[:, :limit].abs().sum(-1) > 0).all()
    assert found[:, limit:].abs().sum() == 0
    one_by_one = torch.cat([moe(x[:1]), moe(x[1:])])
    torch.testing.assert_close(found, one_by_one)


def test_a_capacity_beyond_all_tokens_drops_nothing() -> None:
    x = torch.randn(2, 6, DIM)
    torch.testing.assert_close(build(capacity=1e30)(x), build()(x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_router_of_one_expert_per_token_learns(score: str) -> None:
    """Weights that add up to 1 would be 1, without a gradient."""
    moe = build(top_k=1, score=score)
    moe(torch.randn(4, DIM)).square().sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().sum() > 1e-3


def test_shared_experts_are_added() -> None:
    moe = build(shared=2)
    x = torch.randn(4, DIM)
    assert moe.shared_up is not None and moe.shared_down is not None
    gate, up = moe.shared_up(x).chunk(2, dim=-1)
    wanted = by_token(moe, x, *choose(moe, x)) + moe.shared_down(F.silu(gate) * up)
    torch.testing.assert_close(moe(x), wanted)


def test_the_router_computes_in_fp32_and_experts_in_the_type_of_autocast() -> None:
    moe = build()
    x = torch.randn(5, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = moe(x)
    assert narrow.dtype == torch.bfloat16
    index, weights = choose(moe, x)
    half = x.bfloat16().float()
    torch.testing.assert_close(
        narrow.float(), by_token(moe, half, index, weights), rtol=3e-2, atol=3e-2
    )


def test_a_balance_loss_adds_the_gradient_of_the_loads_of_the_step_before() -> None:
    moe = build(balance=pdrun.Balance("loss", 0.1))
    moe.balance_state.copy_(torch.rand(EXPERTS).softmax(0))
    x = torch.randn(6, DIM)
    scores = (x @ moe.router.weight.T).softmax(-1)
    penalty = 0.1 * EXPERTS * (scores * moe.balance_state).sum()
    wanted = by_token(moe, x, *choose(moe, x)).sum() + penalty
    mine = torch.autograd.grad(moe(x).sum(), moe.router.weight)[0]
    torch.testing.assert_close(mine, torch.autograd.grad(wanted, moe.router.weight)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype: torch.dtype) -> None:
    """It is one graph; in other types than bf16 torch does not trace grouped_mm."""
    moe = build(balance=pdrun.Balance("bias", 0.1)).to(dtype)
    x = torch.randn(3, 5, DIM, dtype=dtype)
    whole = torch.compile(moe, backend="aot_eager", fullgraph=True)
    found, wanted = whole(x), moe(x)
    # compiled code keeps the weights of a sum in fp32
    limits = {"rtol": 3e-2, "atol": 5e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, wanted, **limits)
    weights = list(moe.parameters())
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(wanted.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **limits)


def test_compiled_code_drops_the_same_rows() -> None:
    moe = build(capacity=1.0)
    x = torch.randn(3, 5, DIM, requires_grad=True)
    whole = torch.compile(moe, backend="aot_eager")
    inputs = [x, *moe.parameters()]
    found, wanted = whole(x), moe(x)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_on_fake_tensors() -> None:
    """Estimates of memory compute on tensors without data."""
    with FakeTensorMode():
        moe = build(shared=1)
        out = moe(torch.randn(3, 5, DIM))
        out.sum().backward()
    assert out.shape == (3, 5, DIM)
    assert moe.up.grad is not None and moe.up.grad.shape == moe.up.shape


def test_loads_are_multiples_of_the_mean() -> None:
    found = StepLoads({"moe": 2}, torch.tensor([[3, 1, 4]])).read()["moe"]
    assert (found.load_max, found.load_min, found.dropped) == (1.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_k": 9}, "top_k=9 is more than the 8 experts"),
        ({"top_k": 0}, "top_k must be a count of at least 1, got 0"),
        ({"groups": (3, 1)}, "8 experts make no 3 equal groups"),
        ({"groups": (4, 1), "top_k": 3}, "top_k=3 is more than the 2 experts of 1 groups"),
        ({"score": "tanh"}, "score must be one of softmax, sigmoid, got 'tanh'"),
        ({"capacity": 0}, "capacity must be above 0"),
        ({"capacity": "1"}, "capacity must be above 0, got '1'"),
        ({"capacity": True}, "capacity must be above 0, got True"),
        ({"capacity": float("inf")}, "capacity must be above 0, got inf"),
        ({"scale": None}, "scale must be above 0, got None"),
        ({"scale": float("nan")}, "scale must be above 0, got nan"),
        ({"normalize": "no"}, "normalize must be True or False, got 'no'"),
        ({"normalize": True, "top_k": 1}, "the router would not learn"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type, got torch.int8"),
        ({"activation": "elu"}, "activation must be one of"),
        ({"activation": ["relu"]}, "activation must be one of"),
        ({"balance": "bias"}, "balance must be a pdrun.Balance, got 'bias'"),
        ({"shared": -1}, "shared must be a count, got -1"),
    ],
)
def test_numbers_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(**options)
    assert text in str(caught.value)


def test_balance_and_capacity_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="kind must be one of bias, loss"):
        pdrun.Balance("sinkhorn")
    for rate in (0, True, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="rate must be above 0"):
            pdrun.Balance("bias", rate)
    with pytest.raises(UsageError, match="capacity needs an input"):
        build(capacity=1.0)(torch.randn(4, DIM))


@pytest.mark.parametrize("kind", ["grouped_mm", "_grouped_mm", "grouped_product"])
def test_searches_of_plans_price_one_expert_per_row(kind: str) -> None:
    """However many experts there are."""
    operator: Any = SimpleNamespace(kind=kind)
    found = count_products(operator, [(30, DIM), (EXPERTS, DIM, HIDDEN)], [(30, HIDDEN)])
    assert found is not None and found.flops == 2.0 * 30 * DIM * HIDDEN
