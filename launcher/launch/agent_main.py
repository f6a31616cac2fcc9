"""
One agent of several on this machine: ``python -m pdrun.launcher.launch.agent_main``, started by
`pdrun.launcher.controller.controller`.

One line of JSON on stdin says what to do (see `pdrun.launcher.controller.local`). stdin then stays
open: its end means that the process which started this one is gone, and everything is ended at
once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pdrun import process_setup

LONGEST_LINE = 16 << 20


def main() -> int:
    """Read the order, run the agent, return its exit code; never raises."""
    process_setup.setup_process()
    from pdrun import async_writer
    from pdrun.errors import PdrunError

    try:
        order = _read_order()
        if order.get("nofile"):
            process_setup.remember_nofile_limit(*order["nofile"])
        return _run(order)
    except PdrunError as error:
        async_writer.write_message(str(error))
        return error.exit_code
    except Exception as error:
        from pdrun.launcher.common.exit import fault

        return fault(error)


def _read_order() -> dict[str, Any]:
    """Read one line from descriptor 0, byte-exact: nothing after it may be taken into a buffer."""
    from pdrun.errors import ConfigError

    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            raise ConfigError("no order came on standard input", where="agent_main")
        if len(line) > LONGEST_LINE:
            raise ConfigError(
                f"the order is longer than {LONGEST_LINE >> 20} MiB",
                where="agent_main",
                hint="pass less in the script's arguments and by --env: a file that all nodes read, say",
            )
        line += data
    try:
        order = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"the order is no JSON: {error}", where="agent_main") from None
    if not isinstance(order, dict):
        raise ConfigError("the order is no object", where="agent_main")
    return order


def _run(order: dict[str, Any]) -> int:
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.launch.agent_options import Seat
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.plan import facts
    from pdrun.launcher.plan.plan import plan
    from pdrun.rendezvous.protocol.security import Secret

    spec = JobSpec.from_json(order["spec"])
    made = plan(spec, facts.gather(spec), order["sources"])
    return execute(
        made,
        Seat(
            secret=Secret.from_hex(order["secret"]),
            scheduler_fd=order["scheduler_fd"],
            lifeline=0,
            console=Console.from_json(order),
            quiet=order["quiet"],
            front=order["front"],
            run=order["run"],
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
