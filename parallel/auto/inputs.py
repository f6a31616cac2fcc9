"""
The texts that `parallelize` accepts for ``mesh=`` and ``strategy=``: "auto", or a plan file.

A plan file gives what the call leaves at its default: options, pipeline, strategy and mesh. What
the call sets has priority. ``mesh="auto"`` chooses the same things by a search.

Under ``pdrun plan`` (variable PDRUN_PLAN) the first call of `parallelize` prints the plan and ends
the script.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.auto.auto import Auto, detect_topology
from pdrun.parallel.auto.degrees.expert_layers import (
    describe_experts,
    find_expert_layers,
    make_expert_strategy,
)
from pdrun.parallel.auto.degrees.planner import ADAM_STATE_BYTES, PlanReport, plan_of
from pdrun.parallel.auto.measure import check_measurable, read_request
from pdrun.parallel.auto.mindspore_strategies import MindSporeOperators
from pdrun.parallel.auto.plan_entries import describe_operators
from pdrun.parallel.auto.plan_file import OPTION_NAMES, PlanFile, StepPrediction, read_plan
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.startup.init import PLAN_VARIABLE
from pdrun.parallel.tensor.strategy import Strategy
from pdrun.parallel.zero.optimizer import state_bytes_per_element
from pdrun.text import quote_command

AUTO = "auto"
WHERE = "pdrun.parallelize"


@dataclass(frozen=True)
class ParallelChoices:
    """The arguments of `parallelize` that a plan or a search can choose, with their defaults."""

    mesh: Any = None
    strategy: Any = None
    pipeline: Any = None
    optimizer_level: Any = 0
    shard_group: Any = None
    accumulate: Any = 1
    copies: Any = 1
    gather: Any = None
    recompute: Any = None
    predicted: StepPrediction | None = None
    """What the search of a plan has predicted for a step."""


@dataclass(frozen=True)
class PlannedCall:
    """The other arguments of `parallelize` that a search needs."""

    model: Any
    optimizer: Any
    sample: Any
    precision: Any
    forward: Any
    compile: Any = None


def resolve_choices(
    choices: ParallelChoices, call: PlannedCall, count_ranks: Callable[[], int]
) -> ParallelChoices:
    """
    Return the choices with objects in place of texts.

    Args:
        count_ranks: returns the number of devices; joins the job.

    Raises:
        UsageError: mesh and strategy are different files, or "auto" cannot be combined with an
            argument.
        ConfigError: a file is no plan, or does not fit the number of devices.
    """
    if PLAN_VARIABLE in os.environ:
        _print_plan(choices, call, count_ranks())
    measured = read_request()
    if measured is not None:
        found = _take_file(ParallelChoices(), read_plan(measured.plan), count_ranks())
        return _prepare_search(found, call)
    if not (isinstance(choices.mesh, str) or isinstance(choices.strategy, str)):
        return _prepare_search(choices, call)
    files = dict.fromkeys(
        value
        for value in (choices.mesh, choices.strategy)
        if isinstance(value, str) and value != AUTO
    )
    if len(files) > 1:
        what = f"mesh and strategy must be the same plan file, got {' and '.join(files)}"
        raise UsageError(what, where=WHERE, hint="one file has both")
    if choices.mesh == AUTO:
        if files:
            what = 'mesh="auto" and a plan file as strategy contradict each other'
            raise UsageError(what, where=WHERE, hint='mesh and strategy "auto", or both the file')
        return _prepare_search(_search_mesh(choices, call, count_ranks()), call)
    for path in files:
        choices = _take_file(choices, read_plan(path), count_ranks())
    if choices.strategy == AUTO:
        choices = replace(choices, strategy=_make_auto(choices.mesh, call.model))
    return _prepare_search(choices, call)


def _make_auto(mesh: Any, model: Any) -> Auto | Strategy:
    """
    Return what ``strategy="auto"`` means on a mesh: a search, or all experts cut over ep.

    Raises:
        UsageError: the mesh has ep and tensor axes.
    """
    if not isinstance(mesh, Mesh) or mesh.ep == 1 or not isinstance(model, nn.Module):
        return Auto()
    layers = find_expert_layers(model)
    if not layers:
        what = f'{mesh}: strategy="auto" finds no experts in the model to cut over ep'
        hint = "use dp, or give pdrun.Strategy with experts('ep') for a module with a list of them"
        raise UsageError(what, where=WHERE, hint=hint)
    tensor = [axis for axis in mesh.tensor_axes if mesh.degree(axis) > 1]
    if tensor:
        what = f'{mesh}: strategy="auto" splits operators over {tensor[0]} or experts over ep'
        raise UsageError(what, where=WHERE, hint="use one of both, or give pdrun.Strategy(...)")
    return make_expert_strategy(describe_experts(model, layers))


def _prepare_search(choices: ParallelChoices, call: PlannedCall) -> ParallelChoices:
    """Return choices whose search knows how a step computes: prices depend on it."""
    if not isinstance(choices.strategy, Auto):
        return choices
    passes = getattr(choices.pipeline, "microbatches", choices.accumulate)
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        passes = 1  # `parallelize` refuses it
    return replace(
        choices, strategy=choices.strategy.for_step(passes, call.precision, bool(call.compile))
    )


# ---- plan files -------------------------------------------------------------


def _take_file(
    choices: ParallelChoices, found: PlanFile | MindSporeOperators, world: int
) -> ParallelChoices:
    """Return choices with what a plan file, or MindSpore's file of operators, gives."""
    if isinstance(found, PlanFile):
        return _take_plan(choices, found, world)
    if isinstance(choices.mesh, str):
        what = f"{found.where} has operators, but no mesh"
        raise UsageError(what, where=WHERE, hint="strategy= takes the file; leave mesh= out")
    return replace(choices, strategy=found)


def _take_plan(choices: ParallelChoices, plan: PlanFile, world: int) -> ParallelChoices:
    """Return choices in which a plan file gives what has its default."""
    defaults = {field.name: field.default for field in fields(ParallelChoices)}
    found: dict[str, Any] = {}
    if isinstance(choices.mesh, str) or choices.mesh is None:
        found["mesh"] = plan.make_mesh(world)
    if (isinstance(choices.strategy, str) and choices.strategy != AUTO) or (
        choices.strategy is None
    ):
        found["strategy"] = plan.make_strategy()
    mesh: Mesh = found.get("mesh", choices.mesh)
    if choices.pipeline is None and mesh.pp > 1:
        found["pipeline"] = plan.make_pipeline()
    for name in OPTION_NAMES:
        if name in plan.options and getattr(choices, name) == defaults[name]:
            found[name] = _read_option(name, plan.options[name])
    if not _is_changed(choices, defaults):
        found["predicted"] = plan.predict_step(world)
    if found.get("pipeline", choices.pipeline) is not None:
        found.pop("accumulate", None)
    if mesh.row_parts * mesh.cp == 1:
        found.pop("shard_group", None)
    return replace(choices, **found)


def _is_changed(choices: ParallelChoices, defaults: Mapping[str, Any]) -> bool:
    """Return whether a call sets anything that a plan has, so that the plan is another one."""
    given = {name: getattr(choices, name) for name in defaults}
    for name in ("mesh", "strategy"):
        if isinstance(given[name], str):
            given[name] = None
    return given != dict(defaults)


def _read_option(name: str, value: Any) -> Any:
    """Return an option of a plan file; JSON has lists where `parallelize` takes tuples."""
    is_pair = isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)
    if name == "recompute" and is_pair:
        return (value[0], value[1])
    return value


# ---- searches ---------------------------------------------------------------


def _search_mesh(choices: ParallelChoices, call: PlannedCall, world: int) -> ParallelChoices:
    """Return the choices of the best candidate; what the call sets is fixed."""
    auto = _require_auto(choices)
    report = _search_call(choices, call, auto, world)
    plan = report.plan_file()
    found = _take_plan(replace(choices, strategy=None, mesh=None), plan, world)
    is_split = any(found.mesh.degree(axis) > 1 for axis in found.mesh.tensor_axes)
    strategy = auto if is_split else plan.make_strategy()
    if choices.gather is None and choices.recompute is None:  # the search chooses them
        found = replace(found, predicted=plan.predict_step(world))
    return replace(found, strategy=strategy)


def _require_auto(choices: ParallelChoices) -> Auto:
    """Return the strategy that searches; refuse arguments that a search of the mesh replaces."""
    for name in ("pipeline", "shard_group"):
        if getattr(choices, name) is not None:
            what = f'mesh="auto" chooses {name}=, got {getattr(choices, name)!r}'
            raise UsageError(what, where=WHERE, hint=f"remove {name}=, or give mesh=")
    if choices.copies != 1:
        what = f'copies={choices.copies!r} is not supported with mesh="auto"'
        raise UsageError(what, where=WHERE, hint="give mesh=pdrun.mesh(...)")
    if choices.strategy in (None, AUTO):
        return Auto()
    if isinstance(choices.strategy, Auto) and not choices.strategy.entries:
        return choices.strategy
    raise UsageError(
        'mesh="auto" needs strategy="auto", or pdrun.Auto without entries',
        where=WHERE,
        hint="entries name axes of a mesh: give mesh=pdrun.mesh(...)",
    )


def _search_call(
    choices: ParallelChoices, call: PlannedCall, auto: Auto, world: int, **more: Any
) -> PlanReport:
    """Search the degrees for the arguments of a call."""
    fixed: dict[str, int] = {}
    if isinstance(choices.mesh, Mesh):
        fixed = {name: choices.mesh.degree(name) for name in ("pp", "dp", "ep", "tp")}
    if choices.optimizer_level:
        fixed["level"] = choices.optimizer_level
    if choices.accumulate != 1:
        fixed["microbatches"] = choices.accumulate
    options = {
        "topology": auto.topology,
        "gather": auto.gather,
        "search": auto.search,
        "fixed": fixed,
        **more,
    }
    if not isinstance(call.model, nn.Module):
        what = f"model must be a torch.nn.Module, got {type(call.model).__name__}"
        raise UsageError(what, where=WHERE)
    return plan_of(
        call.model,
        call.sample,
        devices=world,
        state_bytes=_count_state_bytes(call.optimizer),
        precision=call.precision,
        forward=call.forward,
        compiled=bool(call.compile),
        **options,
    )


def _count_state_bytes(optimizer: Any) -> float:
    """Return the bytes of optimizer state per element, measured on a small tensor."""
    if callable(optimizer):
        try:
            optimizer = optimizer([nn.Parameter(torch.zeros(8))])
        except Exception:  # it needs the model's own parameters
            return ADAM_STATE_BYTES
    if not isinstance(optimizer, torch.optim.Optimizer):
        return ADAM_STATE_BYTES
    return state_bytes_per_element(optimizer, torch.device("cpu"))


def _print_plan(choices: ParallelChoices, call: PlannedCall, world: int) -> None:
    """
    Print the plan that ``pdrun plan`` asks for, and end the script.

    Raises:
        SystemExit: always, with code 0.
    """
    request = json.loads(os.environ[PLAN_VARIABLE])
    Path(request["reached"]).touch()
    auto = choices.strategy if isinstance(choices.strategy, Auto) else Auto()
    more = {
        name: request[name]
        for name in ("topology", "memory", "rows", "search")
        if request.get(name) is not None
    }
    if request["fixed"]:
        more["fixed"] = request["fixed"]
    unused = _find_unused(choices)
    if unused:
        names = ", ".join(f"{name}=" for name in unused)
        print(f"not used: {names} of the script; the search chooses what they set", flush=True)
    report = _search_call(choices, call, auto, world, **more)
    print(report.describe(request["top"]), flush=True)
    _ = report.choice  # an error if nothing fits
    if request.get("measure"):
        check_measurable(world, report.result.request.topology, detect_topology())
        for place in range(min(request["measure"], len(report.result.fitting))):
            path = Path(request["folder"], f"plan-{place:04}.json")
            path.write_text(json.dumps(report.to_plain(place)), encoding="utf-8")
    elif request.get("save"):
        try:
            report.save(request["save"])
        except OSError as error:
            raise ConfigError(f"cannot be written: {error}", where=request["save"]) from None
        print(describe_start(request["save"], world, report.result.request.topology), flush=True)
    raise SystemExit(0)


def describe_start(path: str, devices: int, topology: Topology) -> str:
    """Return how a saved plan is run: the arguments of the call, and the job."""
    inner = topology.levels[0].devices or devices
    job = ["--devices", devices]
    if devices > inner and devices % inner == 0:
        job = ["--nodes", devices // inner, "--devices", inner]
    return (
        f'saved; run it with parallelize(..., mesh="{path}", strategy="{path}")'
        f" and {quote_command('pdrun', *job, sys.argv[0])}"
    )


def describe_searched_plan(strategy: Any, model: nn.Module) -> list[tuple[str, str]]:
    """
    Return a name and a digest of the plan that a search chose, to be compared with other ranks';
    empty without a search. Ranks with other devices find other plans unless topology= is given.
    """
    engine = find_engine(model)
    if not isinstance(strategy, Auto) or engine is None or engine.first_plan is None:
        return []
    text = json.dumps(describe_operators(engine.first_plan))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return [("the plan of pdrun.Auto (topology= makes it the same on all devices)", digest)]


def _find_unused(choices: ParallelChoices) -> list[str]:
    """Return the arguments of a call that a search of degrees does not read."""
    read = ("mesh", "optimizer_level", "accumulate", "predicted")
    found = [
        field.name
        for field in fields(ParallelChoices)
        if field.name not in read and getattr(choices, field.name) != field.default
    ]
    auto = choices.strategy
    searched = auto == AUTO or (isinstance(auto, Auto) and not auto.entries)
    return [name for name in found if name != "strategy" or not searched]
