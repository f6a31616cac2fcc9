"""
A plan that ``pdrun plan --measure`` runs: a few steps on the sample, timed; then the script ends.

The command starts the script as a job with the variable PDRUN_MEASURE_PLAN: the plan file, the rows
of a step, and the file for the result. The first call of `parallelize` takes the plan instead of
its arguments, and `measure_steps` makes the steps.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES
from pdrun.parallel.auto.degrees.planner import repeat_rows
from pdrun.parallel.auto.topology import Topology

MEASURE_VARIABLE = "PDRUN_MEASURE_PLAN"
WARMUP_STEPS = 2
"""The first steps allocate memory and start communicators."""
MEASURED_STEPS = 5


@dataclass(frozen=True)
class MeasureRequest:
    """What the command asks for: a plan file, where to write, and the rows of a step."""

    plan: str
    result: str
    rows: int | None = None


def read_request() -> MeasureRequest | None:
    """Return the request of ``pdrun plan --measure``; None in any other job."""
    text = os.environ.get(MEASURE_VARIABLE)
    return None if text is None else MeasureRequest(**json.loads(text))


def measure_steps(
    request: MeasureRequest, step: Callable[[Any], Any], sample: Any, device: torch.device
) -> None:
    """
    Make some steps, write the median of their seconds, and end the script.

    Raises:
        SystemExit: always, with code 0.
    """
    batch = sample if request.rows is None else repeat_rows(sample, request.rows)
    seconds = []
    for _ in range(WARMUP_STEPS + MEASURED_STEPS):
        started = time.perf_counter()
        _ = step(batch).loss  # waits for the device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - started)
    result = {"seconds": statistics.median(seconds[WARMUP_STEPS:]), "steps": MEASURED_STEPS}
    # a step ends on all ranks together, so every rank may write
    partial = Path(f"{request.result}.{os.getpid()}")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(request.result)
    raise SystemExit(0)


def check_measurable(devices: int, topology: Topology, detected: Topology) -> None:
    """
    Refuse to measure what this machine is not.

    Args:
        topology: for which the plans were made.
        detected: the built-in topology of this machine's devices.

    Raises:
        UsageError: the plans are for other devices, or for more than this machine has.
    """
    if BUILTIN_TOPOLOGIES.get(topology.name) == topology and topology.name != detected.name:
        what = f"plans for {topology.name} cannot be measured here: this machine is {detected.name}"
        hint = "pdrun doctor --calibrate --save FILE describes this machine for --topology"
        raise UsageError(what, where="--measure", hint=hint)
    if detected.name == "cpu":
        return
    found = torch.accelerator.device_count()
    if devices > found:
        what = f"this machine has {found} devices, and the plans need {devices}"
        hint = "measure plans for --devices of one machine"
        raise UsageError(what, where="--measure", hint=hint)
