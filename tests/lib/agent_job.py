"""
Runs a hand-made plan of one node, as a process of its own: ``python -m tests.lib.agent_job '{"argv":
[...], ...}'``.

The keys are those of `fakes.make_plan`; the agent, keeper, output and in-process scheduler are the
real ones. With ``rounds`` it is done that often before in one process, which prints after each what
it still holds.
"""

from __future__ import annotations

import json
import os
import sys

from pdrun.errors import PdrunError
from pdrun.launcher.launch.execute import execute
from tests.lib.agent_fakes import make_plan


def main() -> int:
    options = json.loads(sys.argv[1])
    options["argv"] = tuple(options["argv"])
    try:
        for number in range(options.pop("rounds", 0)):
            code = execute(make_plan(**options))
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                held = len(os.listdir("/proc/self/fd")), len(children.read().split())
            print(
                f"round {number} code {code} descriptors {held[0]} children {held[1]}", flush=True
            )
        return execute(make_plan(**options))
    except PdrunError as error:
        print(f"pdrun: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
