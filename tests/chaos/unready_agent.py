"""
An agent that is not ready until a file appears, so that a generation stays assigned.

    unready_agent.py FILE python -m pdrun ...

It joins as any other, and waits before it answers its assignment. No heartbeat is sent meanwhile:
it is lost after ten seconds.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from pdrun.launcher.agent import generation

MAX_SECONDS = 60.0


def main() -> None:
    """Run pdrun with a preflight that waits."""
    awaited = Path(sys.argv[1])
    check = generation.run_preflight

    def check_late(*args: Any) -> Any:
        deadline = time.monotonic() + MAX_SECONDS
        while not awaited.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return check(*args)

    generation.run_preflight = check_late
    sys.argv[1:5] = []  # FILE python -m pdrun
    runpy.run_module("pdrun", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
