"""Late variables of many ranks: one line per job."""

from __future__ import annotations

import json

from pdrun.launcher.agent.channel import parse_report
from pdrun.launcher.diagnosis.late_variables import COLLECT_SECONDS, LateVariableCounter


def test_the_line_counts_ranks_and_is_printed_once() -> None:
    counter = LateVariableCounter()
    for rank in range(3):
        counter.add_report(rank, ["TORCH_LOGS"], 5.0 + rank / 10, workers=4)
        assert counter.print_at == 5.0 + COLLECT_SECONDS
    counter.add_report(3, ["TORCH_LOGS"], 5.4, workers=4)
    assert counter.print_at == 5.4
    assert "TORCH_LOGS has no effect: set by 4 ranks before" in counter.take_line()
    counter.add_report(0, ["TORCH_LOGS"], 9.0, workers=4)
    assert counter.print_at is None
    assert counter.take_line() == ""


def test_a_single_rank_is_counted_after_a_moment() -> None:
    counter = LateVariableCounter()
    counter.add_report(1, ["A", "B"], 1.0, workers=2)
    assert counter.print_at == 1.0 + COLLECT_SECONDS
    assert counter.take_line().startswith("A, B has no effect: set by 1 rank ")


def test_reports_are_checked() -> None:
    def parse(late: object) -> tuple[str, ...] | None:
        report = parse_report(json.dumps({"rank": 1, "generation": 0, "late": late}).encode())
        return None if report is None else report.late

    assert parse(["OMP_NUM_THREADS"]) == ("OMP_NUM_THREADS",)
    for wrong in ("OMP", ["A B"], [""], ["\x1b[31m"], [1], {"A": 1}, ["A" * 101]):
        assert parse(wrong) is None
