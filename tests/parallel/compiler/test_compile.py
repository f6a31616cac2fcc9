"""
torch.compile on cut models: the numbers of one process, the same collectives, and code that layers
share.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.compiler import compile as compiling
from pdrun.parallel.report.model_copies import reference_copy
from pdrun.parallel.tensor.style import SharedInput
from tests.lib import compositions as mixed
from tests.lib.compositions import Place, Task
from tests.lib.tiers import thorough

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

EAGER = ("compile", {"backend": "aot_eager"})
"""All of torch.compile but the making of kernels."""
BOUND = 400.0
"""Seconds: compilers take their time, all the more where others work too."""
DROPS = Task(p=0.2, tied=True, clip=0.3)
CASES = [
    thorough(DROPS, Place(dp=2, tp=2, level=3, accumulate=2)),
    (DROPS, Place(dp=2, level=3, accumulate=2)),
    thorough(Task(), Place(dp=2, level=1, more=(("recompute", "full"),))),
    thorough(DROPS, Place(tp=2, copies=2)),
    thorough(DROPS, Place(tp=2)),
    (Task(), Place(tp=2, kind="sequence", more=(("recompute", "full"),))),
    thorough(Task(), Place(tp=2, kind="sequence", copies=2)),
    thorough(Task(), Place(dp=2, tp=2, kind="sequence", level=3)),
    thorough(Task(), Place(tp=2, kind="2d")),
    (Task(layers=1), Place(tp=2, kind="2d", copies=2)),
    thorough(DROPS, Place(tp=2, kind="2d", copies=2)),
    thorough(Task(), Place(tp=4, kind="2d")),
    (Task(), Place(tp=2, kind="operators")),
    (Task(layers=4), Place(pp=2, accumulate=4, schedule="interleaved")),
    thorough(Task(), Place(cp=2)),
    (Task(), Place(cp=2, ulysses=2, level=2)),
]


def compiled(place: Place) -> Place:
    """
    Return a place whose layers are compiled, all of them: torch gives up on code that was compiled
    often before.
    """
    torch._dynamo.reset()
    return replace(place, more=(*place.more, EAGER))


def prove(task: Task, place: Place, folder: str) -> mixed.Told:
    """
    Train with compiled layers, go back to what was saved on the way and train on; return losses and
    norms.
    """
    run = mixed.make(task, compiled(place))
    run.verify([mixed.batch_of(rows, 9) for rows in sorted(set(task.rows))])
    message = []
    for step, rows in enumerate(task.rows):
        if step == 2:
            run.save(folder)
            run.step(mixed.batch_of(rows, 9))
            run.load(folder)
        message.append(run.step(mixed.batch_of(rows, step)))
    return [(one.loss, one.grad_norm) for one in message]


def prove_twice(task: Task, place: Place, folder: str) -> mixed.Told:
    """Train with compiled layers and save; another compiled run takes it up and trains on."""
    how = compiled(place)
    return mixed.first(task, how, folder) + mixed.second(task, how, folder)


def check(
    worlds: Any, proof: Callable[..., mixed.Told], task: Task, place: Place, folder: Path
) -> None:
    """Hold losses and norms against one process."""
    message = worlds(place.world).run(proof, task, place, str(folder), bound=BOUND)
    want = worlds(1).run(mixed.alone, task, place.slices)[0]
    for one in message:
        assert [loss for loss, _ in one] == pytest.approx([loss for loss, _ in want], rel=2e-6)
        assert [norm for _, norm in one] == pytest.approx([norm for _, norm in want], rel=2e-5)


@pytest.mark.parametrize(
    ("task", "place"), CASES, ids=lambda one: str(one) if isinstance(one, Place) else ""
)
def test_compiled_layers_compute_what_one_process_does(
    task: Task, place: Place, worlds: Any, tmp_path: Path
) -> None:
    check(worlds, prove, task, place, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place", [Place(dp=2, level=3, accumulate=2), Place(tp=2, kind="operators")], ids=str
)
def test_another_compiled_run_takes_up_what_was_saved(
    place: Place, worlds: Any, tmp_path: Path
) -> None:
    check(worlds, prove_twice, DROPS, place, tmp_path)


def entries(model: nn.Module) -> list[tuple[str, SharedInput]]:
    """Return the ways of tensors into cut modules."""
    found = []
    for name, module in model.named_modules():
        enter = getattr(getattr(module, "_context", None), "enter", None)
        enter = enter.keywords.get("enter") if isinstance(enter, functools.partial) else enter
        if isinstance(enter, SharedInput):
            found.append((name, enter))
    assert len(found) > 8
    return found


def count(kind: str, compile: Any) -> Any:
    """Return the collectives of a step along tp, and how many graphs torch made for four layers."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    run = mixed.make(Task(layers=4), Place(tp=2, kind=kind, more=(("compile", compile),)))
    run.step(mixed.batch_of(12, 0))
    run.axes.reset_counts()
    run.step(mixed.batch_of(12, 1))
    held = (
        [name for name, entry in entries(run.model) if entry._key is not None]
        if kind == "sequence"
        else []
    )
    assert held == [], "what a layer has gathered goes when the last of its modules has had it"
    message = {key: (one.calls, one.nbytes) for key, one in run.axes.counts.items()}
    names = run.state.compiled_modules
    assert not names or f"compiled: {names[0]}" in run.explain()
    return message, counters["stats"]["unique_graphs"], dict(counters["graph_break"]), names


@pytest.mark.parametrize("kind", ["sequence", thorough("operators")])
def test_the_same_collectives_in_one_graph_for_all_layers(worlds: Any, kind: str) -> None:
    plain = worlds(2).run(count, kind, None)
    compiled = worlds(2).run(count, kind, {"backend": "aot_eager"}, bound=BOUND)
    for (want, none, _, nobody), (found, graphs, breaks, names) in zip(
        plain, compiled, strict=True
    ):
        assert (none, nobody, names) == (0, [], [f"layers.{place}" for place in range(4)])
        assert found == want and sum(calls for calls, _ in found.values()) >= 4 * 4
        assert (graphs, breaks) == (1, {})


def kernels(place: Place) -> Any:
    """
    Train two steps with kernels; return losses and norms, and the operators of each generated
    program in order.
    """
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        how = Place(**{**vars(place), "more": (("compile", True),)})
        message, programs = run_and_get_code(lambda: mixed.first(Task(), how, None))
    return message, [
        re.findall(r"pdrun_axis\.(\w+)\.default\(|extern_kernels\.(\w*mm)\(", one)
        for one in programs
    ]


SHORT = {"start_all_gather": "g", "start_reduce_scatter": "s", "wait": "w", "mm": "m", "addmm": "m"}


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++, with which torch makes kernels for CPUs"
)
def test_kernels(worlds: Any) -> None:
    want = worlds(1).run(mixed.alone, Task(), 1)[0]
    for message, programs in worlds(2).run(kernels, Place(tp=2, kind="sequence"), bound=BOUND):
        assert [loss for loss, _ in message] == pytest.approx(
            [loss for loss, _ in want[:2]], rel=2e-6
        )
        forward, backward = [
            "".join(SHORT[axis or kernel] for axis, kernel in one) for one in programs
        ]
        # products of q, k and v, wo, gate and up, down; then each with two products, of which one
        # is put off
        assert forward == "gwmmmmswgwmmmsw"
        assert backward == "gwmmmsmmmwgwmmmmsmmmmw", (
            "products for weights run while a sum of parts is on its way"
        )


class Own(nn.Module):
    """Its layers' forwards were replaced by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[1].forward = self.twice

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.linear(x, self.layers[1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def own() -> tuple[bool, list[str]]:
    model = Own()
    run = pdrun.parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: (out.square().sum(), len(batch)),
        compile={"backend": "aot_eager"},
        recompute="full",
    )
    report = run.verify([torch.ones(2, 4)])
    copied = reference_copy(run.state)
    return report.steps[0].max_difference < 1e-6, [
        name for name, each in copied.named_modules() if "forward" in vars(each)
    ]


def test_what_a_user_put_in_the_place_of_a_forward_stays(worlds: Any) -> None:
    assert worlds(1).run(own) == [(True, ["layers.1"])]


REFUSED = [
    (Place(dp=2, more=(("compile", ["blocks.*"]),)), "'blocks.*' matches no module"),
    (
        Place(dp=2, more=(("compile", "layers.*"),)),
        "compile must be a list of globs, got 'layers.*'",
    ),
    (Place(dp=2, more=(("compile", {"speed": 3}),)), "unknown options: speed"),
    (Place(dp=2, more=(("compile", []),)), "compile must name at least one module"),
    (Place(dp=2, more=(("compile", {"modules": ()}),)), "compile must name at least one module"),
    (
        Place(dp=2, more=(("compile", {"options": ["fast"]}),)),
        "options must be a dict, got ['fast']",
    ),
    (Place(dp=2, more=(("compile", {"options": {"fastest": True}}),)), "fastest"),
    (Place(dp=2, more=(("compile", {"mode": "fastest"}),)), "fastest"),
    (Place(dp=2, more=(("compile", {"backend": "inductr"}),)), "inductr"),
    (
        Place(dp=2, more=(("compile", {"backend": "cudagraphs"}),)),
        "CUDA graphs are not supported",
    ),
    (
        Place(dp=2, more=(("compile", {"options": {"triton.cudagraphs": True}}),)),
        "CUDA graphs are not supported",
    ),
    (
        Place(dp=2, more=(("compile", {"mode": "reduce-overhead"}),)),
        "CUDA graphs are not supported",
    ),
    (Place(dp=2, more=(EAGER, ("recompute", "selective"))), "the compiler chooses"),
    (Place(dp=2, more=(EAGER, ("recompute", ["layers.*.mlp"]))), "inside a compiled module"),
]


@pytest.mark.parametrize(("place", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_is_refused(place: Place, text: str, worlds: Any) -> None:
    message = worlds(2).run(mixed.refusal, place)
    assert all(text in one for one in message), message


@pytest.mark.parametrize(
    "value", [True, ["layers.*"], {"backend": "aot_eager", "modules": ["layers.*"]}, ("layers.*",)]
)
def test_ways_to_say_it(value: Any) -> None:
    parsed = compiling.parse_options(value)
    assert parsed is not None
    assert parsed[0] == (None if value is True else ("layers.*",))
    assert compiling.parse_options(None) is compiling.parse_options(False) is None


def test_nothing_is_taken_for_something() -> None:
    with pytest.raises(UsageError, match="must be a list of globs"):
        compiling.parse_options(3)
