"""
The trace of some steps of this worker, which `pdrun trace` asks for: torch's profiler.

The request is a file beside the agent's socket: ``{"id": "9f3c", "steps": 3, "at": 0}``; ``at`` is
the wall clock before which no rank starts. The answer is ``trace-9f3c-RANK.json`` there, a Chrome
trace, or ``trace-9f3c-RANK.error``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MAX_STEPS = 1_000
MAX_WAIT_SECONDS = 60.0
"""Longest time from a request to its start; clocks may differ."""

_handled: set[str] = set()
"""Requests that this worker has answered, or answers now."""


class StepTrace:
    """A profiler that runs for some steps."""

    def __init__(self, torch: Any, steps: int, answer: Path) -> None:
        """
        Start it.

        Raises:
            RuntimeError: another profiler runs.
        """
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._left = steps
        self._answer = answer
        self._record = profiler.record_function
        self._profiler = profiler.profile(activities=activities)
        self._profiler.start()
        self._count = 0
        self._mark_step()

    def _mark_step(self) -> None:
        """Begin a range in the trace: steps are seen as such."""
        self._count += 1
        self._mark = self._record(f"step {self._count} of the trace")
        self._mark.__enter__()

    def count_step(self) -> bool:
        """Count a step; after the last one write the trace. Return whether there are more."""
        self._left -= 1
        try:
            self._mark.__exit__(None, None, None)
            if self._left > 0:
                self._mark_step()
                return True
            self._profiler.stop()
            draft = self._answer.with_suffix(".part")
            self._profiler.export_chrome_trace(str(draft))
            draft.replace(self._answer)
        except (RuntimeError, OSError) as error:
            _write_error(self._answer, str(error))
        return False


def start_trace(request: str, rank: str) -> StepTrace | float | None:
    """
    Start the trace of a request.

    Returns:
        None: it was answered, or cannot be; a number: seconds until it may start.
    """
    path = Path(request)
    try:
        data = json.loads(path.read_text())
        name, steps = str(data["id"]), int(data["steps"])
        wait = float(data.get("at", 0.0)) - time.time()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if name in _handled or not name.isalnum() or not 0 < steps <= MAX_STEPS:
        return None
    if 0 < wait <= MAX_WAIT_SECONDS:
        return wait
    _handled.add(name)
    answer = path.with_name(f"trace-{name}-{rank}.json")
    torch = sys.modules.get("torch")
    if torch is None:
        _write_error(answer, "the script does not use torch")
        return None
    try:
        return StepTrace(torch, steps, answer)
    except RuntimeError as error:
        _write_error(answer, str(error))
        return None


def _write_error(answer: Path, text: str) -> None:
    try:
        answer.with_suffix(".error").write_text(text.splitlines()[0] if text else "unknown")
    except OSError:
        pass  # the agent has ended
