"""Exposed communication: what a rank sends while it computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.jobs.views.trace_summary import CommunicationMeter
from pdrun.ui.report.communication import RankCommunication


def event(name: str, cat: str, begin: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "tid": tid}


def read(*events: dict[str, Any]) -> tuple[float, ...] | None:
    meter = CommunicationMeter()
    for one in events:
        meter.add(one)
    found = meter.read(3)
    if found is None:
        return None
    assert found.rank == 3
    return tuple(round(1e6 * value, 3) for value in found[1:])


STEPS = (
    event("step 1 of the trace", "user_annotation", 0, 100),
    event("step 2 of the trace", "user_annotation", 100, 200),
)


def test_a_device() -> None:
    assert read(
        *STEPS,
        event("aten::mm", "cpu_op", 0, 200),
        event("ampere_gemm", "kernel", 10, 50),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 40, 70),
        event("ncclDevKernel_AllGather", "kernel", 60, 80),
        event("Memcpy HtoD", "gpu_memcpy", 75, 90),
        event("nccl:all_reduce", "gpu_user_annotation", 40, 70),
        event("ncclDevKernel_SendRecv", "kernel", 190, 230),
    ) == (100.0, 40.0, 32.5), "sent 40-80 and 190-230, alone 50-75 and 190-230, of two steps"


def test_a_cpu() -> None:
    assert read(
        *STEPS,
        event("c10d::allreduce_", "cpu_op", 0, 200),
        event("gloo:all_reduce", "user_annotation", 20, 80, tid=2),
        event("aten::add_", "cpu_op", 20, 80, tid=2),
        event("aten::mm", "cpu_op", 0, 50),
    ) == (100.0, 30.0, 15.0), "the backend's own additions are no computation"


def test_what_is_outside_of_the_steps_does_not_count() -> None:
    before = event("gloo:all_reduce", "user_annotation", -90, 10, tid=2)
    assert read(*STEPS, before) == (100.0, 5.0, 5.0)
    assert read(before) is None, "no steps"
    assert read(*STEPS) == (100.0, 0.0, 0.0)


SPAN = st.tuples(st.integers(-20, 220), st.integers(0, 60))


@given(st.lists(SPAN, max_size=8), st.lists(SPAN, max_size=8))
def test_as_counted_by_moments(sends: list[tuple[int, int]], work: list[tuple[int, int]]) -> None:
    events = [event("ncclKernel", "kernel", a, a + b) for a, b in sends]
    events += [event("gemm", "kernel", a, a + b) for a, b in work]
    found = read(*STEPS, *events)
    assert found is not None

    def covers(spans: list[tuple[int, int]], moment: int) -> bool:
        return any(a <= moment < a + b for a, b in spans)

    if not sends and not work:
        return
    sent = [moment for moment in range(300) if covers(sends, moment)]
    alone = [moment for moment in sent if not covers(work, moment)]
    assert found[1:] == pytest.approx((len(sent) / 2, len(alone) / 2))


@pytest.mark.parametrize(
    "damaged",
    [
        {"ph": "X", "name": "ncclKernel", "cat": "kernel", "ts": "x", "dur": 1},
        {"ph": "X", "name": None, "cat": ["kernel"], "ts": 1, "dur": 1},
        {"ph": "X", "name": "ncclKernel", "cat": "kernel", "ts": float("nan"), "dur": 1},
        {"ph": "X", "name": "ncclKernel", "cat": "kernel", "ts": True, "dur": 1},
        {},
    ],
)
def test_damaged_events(damaged: dict[str, Any]) -> None:
    assert read(*STEPS, damaged) == (100.0, 0.0, 0.0)


def test_the_share_of_a_step() -> None:
    assert RankCommunication(0, 2.0, 1.0, 0.5).exposed_share == 0.25
    assert RankCommunication(0, 0.0, 1.0, 0.5).exposed_share == 0.0
