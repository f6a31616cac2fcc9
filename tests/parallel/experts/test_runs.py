"""Experts on several ranks: losses, norms, loads and weights are those of one process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pdrun
from pdrun.errors import UsageError
from tests.lib import moe_models as moe
from tests.lib import tiers
from tests.lib.moe_models import MoECase

pytestmark = pytest.mark.torch

ONE, NONE = {"top_k": 1}, {"experts": 4, "top_k": 2}
BIAS, LOSS = pdrun.Balance("bias", 0.05), pdrun.Balance("loss", 0.1)
TWO = [
    MoECase({"ep": 2}),
    MoECase(
        {"ep": 2},
        model={"balance": LOSS, "shared": 1},
        options={"optimizer_level": 3, "accumulate": 2, "recompute": "full", "clip": 0.5},
        rows=7,
    ),
    MoECase({"ep": 2}, model=ONE, steering="one"),
    MoECase({"ep": 2}, model=NONE, steering="none", options={"optimizer_level": 1}),
    MoECase({"ep": 2}, model={"balance": BIAS}, options={"copies": 2, "optimizer_level": 2}),
    MoECase({"ep": 2}, model={"capacity": 1.0}, rows=5, options={"accumulate": 2}),
    MoECase({"tp": 2}, "tp", model={"balance": LOSS, "shared": 1}, rows=3),
    MoECase({"pp": 2}, None, model={"balance": BIAS}, stages=2),
    MoECase({"ep": 2}, options={"compile": {"modules": ["layers.0"], "backend": "aot_eager"}}),
]
FOUR = [
    MoECase({"dp": 2, "ep": 2}, options={"optimizer_level": 3, "clip": 0.3}, rows=9),
    MoECase({"dp": 2, "ep": 2}, options={"optimizer_level": 2, "accumulate": 2}, model=ONE),
    MoECase({"ep": 2, "tp": 2}, ("ep", "tp"), model={"balance": BIAS}, options={"clip": 0.3}),
    MoECase({"ep": 2, "tp": 2}, "ep", options={"optimizer_level": 1}),
    MoECase({"pp": 2, "ep": 2}, model={"balance": LOSS}, stages=2, options={"clip": 0.3}),
    MoECase({"ep": 4}, model=ONE, steering="one", options={"optimizer_level": 3}, rows=3),
]
ALONE = ("accumulate", "copies", "clip")


def expected(case: MoECase, worlds: Any) -> Any:
    """Return what one process computes with the same slices of a batch."""
    options = {key: value for key, value in case.options.items() if key == "clip"}
    slices = case.options.get("accumulate", 1) * case.options.get("copies", 1)
    if case.stages > 1:
        slices = case.microbatches
    return worlds(1).run(
        moe.train_case,
        replace(
            case, mesh={"dp": 1}, axis=None, stages=1, options={**options, "accumulate": slices}
        ),
        1,
    )[0]


def check(case: MoECase, worlds: Any, world: int) -> None:
    told, weights = expected(case, worlds)
    found = worlds(world).run(moe.train_case, case, world, True)
    assert all(one == found[0] for one in found)
    steps, mine = found[0]
    for (loss, norm, loads), (loss_alone, norm_alone, loads_alone) in zip(steps, told, strict=True):
        assert loss == pytest.approx(loss_alone, rel=3e-6)
        assert norm == pytest.approx(norm_alone, rel=3e-5)
        assert loads == loads_alone
    assert mine == pytest.approx(weights, rel=1e-4, abs=1e-4)


def name_of(case: MoECase) -> str:
    words = [f"{axis}{size}" for axis, size in case.mesh.items()]
    words += [str(case.axis), *case.model, *map(str, case.options), case.steering]
    return "-".join(word for word in words if word)


@pytest.mark.parametrize("case", TWO, ids=name_of)
def test_two_ranks(case: MoECase, worlds: Any) -> None:
    check(case, worlds, 2)


@pytest.mark.parametrize("case", tiers.mark_all_but(3, FOUR), ids=name_of)
def test_four_ranks(case: MoECase, worlds: Any) -> None:
    check(case, worlds, 4)


def test_a_checkpoint_of_any_ep_is_one_of_any_other(worlds: Any, tmp_path: Path) -> None:
    """Saved with experts on two ranks at level 3, loaded by one process, and in reverse."""
    apart = MoECase({"ep": 2}, model={"balance": BIAS}, options={"optimizer_level": 3})
    whole = replace(apart, mesh={"dp": 1}, axis=None, options={})
    for before, first, after, second in ((apart, 2, whole, 1), (whole, 1, apart, 2)):
        folder = str(tmp_path / str(first))
        _, weights = worlds(first).run(moe.train_case, before, first, False, folder)[0]
        loaded, told = worlds(second).run(moe.resume_case, after, second, folder)[0]
        assert loaded == pytest.approx(weights, rel=1e-12)
        again = worlds(first).run(moe.resume_case, before, first, folder)[0][1]
        for one, other in zip(told, again, strict=True):
            assert one == pytest.approx(other, rel=3e-5)


def refuse_case(case: MoECase, world: int) -> str:
    """Return the error of a case."""
    with pytest.raises(UsageError) as caught:
        moe.make_run(case, world)
    return str(caught.value)


def refuse_routers_that_differ(world: int) -> str:
    """Return the error of ranks that route otherwise."""
    rank = int(os.environ["RANK"])
    return refuse_case(MoECase({"ep": world}, model={"top_k": 1 + rank}), world)


def explain_case(case: MoECase, world: int) -> str:
    """Return what a run says of itself after a step."""
    run = moe.make_run(case, world)
    run.step(moe.batches(case, 1)[0])
    return run.explain()


def test_what_cannot_be_is_refused(worlds: Any) -> None:
    two = worlds(2)
    told = two.run(refuse_case, MoECase({"ep": 2}, None), 2)[0]
    assert "ranks along ep would compute the same; pass strategy=" in told
    told = two.run(refuse_case, MoECase({"dp": 1, "ep": 2, "tp": 1}, "tp"), 2)[0]
    assert "no experts are cut over ep" in told
    told = two.run(refuse_case, MoECase({"ep": 2}, model={"experts": 5}), 2)[0]
    assert "5 experts cannot be split evenly over 2 ranks (ep)" in told


def train_on_one_device(world: int) -> list[float]:
    """Return losses without experts on other ranks: with no style, and with styles over one."""
    found = []
    for axis in (None, "ep", ("ep", "tp")):
        case = MoECase({"ep": 1, "tp": 1}, axis)
        found.append(moe.make_run(case, world).step(moe.batches(case, 1)[0]).loss)
    return found


def test_a_script_for_several_devices_runs_on_one(worlds: Any) -> None:
    """`mesh(ep=-1)` of one device has the axis, and experts over it are all there."""
    plain, *others = worlds(1).run(train_on_one_device, 1)[0]
    assert others == [plain, plain]


def test_ranks_that_route_in_another_way(worlds: Any) -> None:
    """The rank that differs ends; the other one waits for it in vain, and the world is dropped."""
    two = worlds(2)
    two.start(refuse_routers_that_differ, 2)
    worked, told = two.answers(until=1)[1]
    two.broken = True
    assert worked and "the experts of layers.0.moe" in told


def test_explain_says_where_experts_are(worlds: Any) -> None:
    told = worlds(2).run(explain_case, MoECase({"ep": 2}), 2)[0]
    assert "layers.0.moe, layers.1.moe: 4 experts, 2 per rank along ep, rows by all-to-all" in told
    # 2 layers, forward and backward, rows there and back: 24 tokens of top 2, 16 numbers each
    sent = 2 * 2 * 2 * 24 * 2 * 16 * 4 / 2**20
    line = next(line for line in told.splitlines() if line.startswith("in the last step"))
    assert "the busiest expert had" in line
    found = float(line.split("sent ")[1].split(" MiB")[0])
    assert 0.7 * sent <= found <= 1.3 * sent, "what comes back is as much as others sent here"


def compile_a_layer(world: int) -> list[str]:
    """Return the names of the functions of pdrun that a compiler has seen."""
    options = {"compile": {"modules": ["layers.0"], "backend": "eager"}}
    case = MoECase({"ep": world}, model={"shared": 1}, options=options)
    torch._dynamo.reset()
    run = moe.make_run(case, world)
    for batch in moe.batches(case, 1):
        run.step(batch)
    codes = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    return [code.co_name for code in codes if code is not None and "/parallel/" in code.co_filename]


def test_wrappers_of_what_is_not_compiled_are_not_compiled(worlds: Any) -> None:
    """Each would be, for each kind of arguments."""
    for names in worlds(2).run(compile_a_layer, 2):
        assert "forward" in names
        assert "call" not in names


def trace_layer(world: int, is_bf16: bool) -> tuple[list[list[str]], list[str], list[float]]:
    """
    Return the operators of each compiled graph of a layer with shared experts, why there are breaks
    between them, and the differences of outputs and gradients to those without a compiler, for
    several numbers of rows.
    """
    case = MoECase({"ep": world}, model={"shared": 1})
    layer = moe.make_run(case, world).model.layers[0].moe
    graphs: list[list[str]] = []

    def record(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward

    compiled = torch.compile(layer, backend=record)
    torch._dynamo.utils.counters.clear()
    differences = []
    for rows in (8, 5):
        found = []
        for call in (layer, compiled):
            torch.manual_seed(rows)
            x = torch.randn(rows, 6, moe.DIM, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                out = call(x)
            layer.zero_grad()
            out.float().square().sum().backward()
            found.append((out.detach().float(), x.grad, layer.up.grad.clone()))
        for one, other in zip(*found, strict=True):
            differences.append(float((one - other).abs().max() / other.abs().max()))
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    return graphs, reasons, differences


@pytest.mark.parametrize("is_bf16", [False, tiers.thorough(True)], ids=["fp32", "bf16"])
def test_compiled_code_is_interrupted_by_exchanges_only(worlds: Any, is_bf16: bool) -> None:
    """Products, activation, shared experts and the weighted sum are in compiled graphs."""
    exchanges = ("_start_exchange", "_finish_exchange", "_send_to_experts", "_send_back")
    for graphs, reasons, differences in worlds(2).run(trace_layer, 2, is_bf16):
        assert max(differences) < (3e-2 if is_bf16 else 1e-5)
        for reason in reasons:
            assert any(name in reason for name in exchanges), reason
        assert {name for name in exchanges if any(name in one for one in reasons)} == {*exchanges}
        product = "grouped_mm" if is_bf16 else "grouped_product"
        (experts,) = {
            tuple(name for name in ("silu", "mul") if any(name in target for target in graph))
            for graph in graphs
            if sum(product in target for target in graph) == 2
        }
        assert experts == ("silu", "mul")
