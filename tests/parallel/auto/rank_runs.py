"""What the ranks of the tests do with automatic plans."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdrun.parallel.auto import auto, calibrate
from pdrun.parallel.auto import measure as measure_plan
from pdrun.parallel.auto.auto import Auto, detect_topology
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.comm.mesh import mesh
from pdrun.parallel.operators.compiler import find_engine
from pdrun.parallel.operators.explain import list_moves
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.run import Run
from pdrun.parallel.startup.init import init
from pdrun.parallel.tensor.vocab_cross_entropy import cross_entropy
from tests.lib.shared_exports import share_exports
from tests.parallel.auto.golden_models import Decoder
from tests.parallel.auto.random_graphs import make_topology

WORDS, LENGTH, ROWS = 96, 16, 4
TOPOLOGIES: dict[str, Topology] = {
    "node": make_topology(1e12, 1e12, 1e-7, 1e-7, 2e11),
    "slow": make_topology(1e15, 1e15, 1e-9, 1e-2, 1e6),
    "free": make_topology(1e9, 1e12, 1e-7, 1e-9, 1e15),
}


OTHER_DEVICES = {
    "free": make_topology(1e9, 1e6, 0.0, 0.0, 1e15),
    "node": make_topology(1e30, 1e30, 0.0, 1.0, 1e6),
}


def small_decoder(layers: int = 2, tied: bool = True) -> Decoder:
    """Return a decoder with the same weights on every rank."""
    torch.manual_seed(0)
    return share_exports(Decoder(layers, 32, WORDS, heads=4, groups=2, wide=48, tied=tied), tied)


def batch_of_tokens() -> tuple[Tensor, Tensor]:
    """Return tokens and labels."""
    torch.manual_seed(1)
    data = torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def token_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Return the sum over tokens, and their number."""
    return cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


def make_run(**options: Any) -> Run:
    """Return a run of the small decoder."""
    layers = options.pop("layers", 2)
    return parallelize(
        small_decoder(layers),
        lambda params: torch.optim.SGD(params, lr=0.1),
        token_loss,
        sample=batch_of_tokens(),
        **options,
    )


def verify_search(
    topology: str, degrees: dict[str, int], search: str, stages: int = 1
) -> dict[str, Any]:
    """Run a searched plan against one process; return it with the bytes predicted and counted."""
    options: dict[str, Any] = {}
    if stages > 1:
        options["pipeline"] = Pipeline(microbatches=stages)
    run = make_run(
        mesh=mesh(pp=stages, **degrees),
        strategy=Auto(gather=False, search=search, topology=TOPOLOGIES[topology]),
        **options,
    )
    run.verify([batch_of_tokens()])
    engine = find_engine(run.model)
    assert engine is not None
    assert engine.first_plan is not None
    moves = list(list_moves(engine.first_plan))
    return {
        "plan": run.plan.to_json(),
        "moves": sum(move.forward_bytes + move.backward_bytes for move in moves),
    }


def count_axis_bytes(topology: str, degrees: dict[str, int]) -> list[dict[str, int]]:
    """Return what a rank sends over each axis in a pass with ring algorithms: planned, counted."""
    run = make_run(mesh=mesh(**degrees), strategy=Auto(topology=TOPOLOGIES[topology]), exact=False)
    engine = find_engine(run.model)
    assert engine is not None
    run.axes.reset_counts()
    run.model(batch_of_tokens()[0]).square().sum().backward()
    assert engine.first_plan is not None
    return [plan_by_axes(engine.first_plan), count_by_axes(run)]


def plan_by_axes(plan: OperatorPlan) -> dict[str, int]:
    """Return what a plan sends in a pass, by axes."""
    planned: Counter[str] = Counter()
    for one in list_moves(plan):
        planned["*".join(one.move.axes)] += one.forward_bytes + one.backward_bytes
    return dict(+planned)


def count_by_axes(run: Run) -> dict[str, int]:
    """Return what this rank has sent with ring algorithms, by axes."""
    counted: Counter[str] = Counter()
    for (name, axes), count in run.axes.counts.items():
        parts = run.axes.grid.group_size(axes)
        sent = {
            "all_gather": count.nbytes * (parts - 1),
            "all_reduce": 2 * count.nbytes * (parts - 1) // parts,
            "reduce_scatter": count.nbytes * (parts - 1) // parts,
            "all_to_all": count.nbytes * (parts - 1) // parts,
        }
        counted["*".join(axes)] += sent[name]
    return dict(+counted)


def save_plan(path: str, topology: str, degrees: dict[str, int], **options: Any) -> None:
    """Save the plan of a run that a search chose."""
    if "stages" in options:
        options["pipeline"] = Pipeline(microbatches=options.pop("stages"))
        degrees = {"pp": 2, **degrees}
    run = make_run(
        mesh=mesh(**degrees),
        strategy=Auto(gather=False, topology=TOPOLOGIES[topology]),
        **options,
    )
    if run.context.rank == 0:
        run.plan.save(path)


def load_plan(path: str, *, as_mesh: bool = True, layers: int = 2) -> dict[str, Any]:
    """Make a run from a plan file, verify it, and return its plan."""
    run = make_run(mesh=path if as_mesh else None, strategy=path, layers=layers)
    run.verify([batch_of_tokens()])
    assert "predicted" not in run.explain().splitlines()[-1] or run.predicted is not None
    return dict(json.loads(run.plan.to_json()))


def auto_strategy(degrees: dict[str, int]) -> str:
    """Run ``strategy="auto"`` on the built-in topology, verify, and return its plan."""
    run = make_run(mesh=mesh(**degrees), strategy="auto")
    run.verify([batch_of_tokens()])
    text = run.explain()
    assert "predicted on cpu, a guess: " in text
    assert "ms per pass over the sample (computation" in text
    return run.plan.to_json()


def read_json(path: str | Path) -> dict[str, Any]:
    """Return a JSON file."""
    return dict(json.loads(Path(path).read_text()))


def auto_mesh() -> str:
    """Run ``mesh="auto", strategy="auto"``, verify, and return the plan."""
    strategy = Auto(gather=False, topology=TOPOLOGIES["node"])
    run = make_run(mesh="auto", strategy=strategy)
    run.verify([batch_of_tokens()])
    assert run.explain().endswith("ms on test; no step is measured yet")
    first, second = run.step(batch_of_tokens()), run.step(batch_of_tokens())
    assert first.seconds is None
    assert second.seconds is not None
    predicted = run.predicted
    assert predicted is not None
    assert first.predicted_seconds == second.predicted_seconds == predicted.seconds
    last = run.explain().splitlines()[-1]
    assert last.startswith("step of 4 rows: predicted ")
    assert f"measured {second.seconds * 1e3:,.2f} ms, " in last
    return run.plan.to_json()


def measured_plan(path: str, result: str) -> list[int]:
    """Run a plan as ``pdrun plan --measure`` does; return the rows of its steps."""
    rows = []

    def note_rows(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        rows.append(len(batch[0]))
        return token_loss(output, batch)

    request = {"plan": path, "result": result, "rows": 8}
    os.environ[measure_plan.MEASURE_VARIABLE] = json.dumps(request)
    try:
        # what the call gives is replaced by the plan
        parallelize(
            small_decoder(),
            lambda params: torch.optim.SGD(params, lr=0.1),
            note_rows,
            sample=batch_of_tokens(),
            accumulate=4,
            optimizer_level=2,
        )
    except SystemExit as exit:
        assert exit.code == 0
        return rows
    finally:
        del os.environ[measure_plan.MEASURE_VARIABLE]
    raise AssertionError("the script did not end")


def measure() -> tuple[str, list[str]]:
    """Measure a topology with small messages and products."""
    calibrate.REPEATS = 3
    calibrate.PRODUCT_SIZES = {"": (64, 256), "cpu": (64, 256)}
    calibrate.COPY_BYTES = {"": 2**22, "cpu": 2**22}
    calibrate.MESSAGE_BYTES = {"": (2**12, 2**18), "cpu": (2**12, 2**18)}
    topology, remarks = calibrate.measure_topology(init(), "test")
    return topology.to_json(), remarks


def verify_hybrid(degrees: dict[str, int]) -> dict[str, Any]:
    """Verify recursive search, stages, optimizer level and recomputation together."""
    run = make_run(
        layers=4,
        mesh=mesh(**degrees),
        strategy=Auto(search="recursive_programming", gather=False, topology=TOPOLOGIES["free"]),
        pipeline=Pipeline(microbatches=2),
        optimizer_level=1,
        recompute="full",
    )
    run.verify([batch_of_tokens()])
    before = run.step(batch_of_tokens()).loss
    after = run.step(batch_of_tokens()).loss
    assert after < before
    return dict(json.loads(run.plan.to_json()))


def estimate_resident(level: int, accumulate: int, gather: str | None) -> dict[str, int]:
    """Return the bytes that a run of Adam says that it keeps, and the number of elements."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    elements = sum(param.numel() for param in model.parameters())
    run = parallelize(
        model,
        lambda params: torch.optim.Adam(params, lr=0.1),
        lambda output, batch: (output.sum(), len(batch)),
        mesh=mesh(dp=2),
        optimizer_level=level,
        accumulate=accumulate,
        gather=gather,
        exact=False,
    )
    found = run.memory()
    return {
        "weights": found.weights,
        "masters": found.masters,
        "gradients": found.gradients,
        "state": found.state,
        "elements": elements,
    }


def search_on_other_devices() -> None:
    """Search on ranks whose devices are of different kinds; the plans store equal weights."""
    name = ("free", "node")[init().rank]
    auto.detect_topology = lambda: OTHER_DEVICES[name]
    try:
        torch.manual_seed(0)
        parallelize(
            torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Linear(8, 8)),
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda output, batch: (output.sum(), len(batch)),
            mesh=mesh(tp=2),
            sample=torch.zeros(64, 8),
            strategy="auto",
        )
    finally:
        auto.detect_topology = detect_topology


def narrow_layers(width: int) -> torch.nn.Sequential:
    """Return two layers with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))


def run_narrow_layers(plan: str, rows: int) -> tuple[list[str], float, float]:
    """
    Run a plan file, or the search of a mesh for nodes of two devices; return its tensor axes, its
    loss, and that of one process.
    """
    torch.manual_seed(1)
    batch = torch.randn(rows, 6)
    strategy: Any = plan
    if plan == "auto":
        strategy = Auto(topology=make_topology(1e9, 1e12, 1e-9, 1e-9, 1e15, 2, (1e-9, 1e15)))
    run = parallelize(
        narrow_layers(6),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, batch: (output.square().sum(), len(batch)),
        mesh=plan,
        strategy=strategy,
        sample=batch,
    )
    run.verify([batch])
    expected = narrow_layers(6)(batch).square().sum().item() / rows
    axes = [name for name in run.axes.grid.names if name.startswith("tp")]
    return axes, run.step(batch).loss, expected
