"""
One agent of several on this machine: ``python -m pdrun.launcher.launch.agent_main``.

`pdrun.launcher.controller.controller` starts it. One line of JSON on stdin describes the agent (see
`pdrun.launcher.controller.local`). stdin then stays open as the lifeline: when it ends, the process
that started this one has exited, and the agent kills everything.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pdrun import process_setup

MAX_PAYLOAD_BYTES = 16 << 20


def main() -> int:
    """Read the payload, run the agent, return its exit code; never raises."""
    process_setup.setup_process()
    from pdrun import async_writer
    from pdrun.errors import PdrunError

    try:
        payload = _read_payload()
        if payload.get("nofile"):
            process_setup.remember_nofile_limit(*payload["nofile"])
        return _run_agent(payload)
    except PdrunError as error:
        async_writer.write_message(str(error))
        return error.exit_code
    except Exception as error:
        from pdrun.launcher.common.exit import report_fault

        return report_fault(error)


def _read_payload() -> dict[str, Any]:
    """
    Read one line from descriptor 0.

    Nothing behind the line is read into a buffer: it belongs to the lifeline.
    """
    from pdrun.errors import ConfigError

    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            raise ConfigError("standard input ended without a payload", where="agent_main")
        if len(line) > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"the payload is longer than {MAX_PAYLOAD_BYTES >> 20} MiB",
                where="agent_main",
                hint="pass fewer arguments and --env values, for example in a file on all nodes",
            )
        line += data
    try:
        payload = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"the payload is not JSON: {error}", where="agent_main") from None
    if not isinstance(payload, dict):
        raise ConfigError("the payload must be a JSON object", where="agent_main")
    return payload


def _run_agent(payload: dict[str, Any]) -> int:
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.launch.agent_options import AgentOptions
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.plan.facts import gather_facts
    from pdrun.launcher.plan.plan import make_plan
    from pdrun.rendezvous.protocol.security import Secret

    spec = JobSpec.from_json(payload["spec"])
    plan = make_plan(spec, gather_facts(spec), payload["sources"])
    options = AgentOptions(
        secret=Secret.from_hex(payload["secret"]),
        scheduler_fd=payload["scheduler_fd"],
        lifeline_fd=0,
        console=Console.from_json(payload),
        is_quiet=payload["quiet"],
        controller_pid=payload["front"],
        run=payload["run"],
    )
    return execute(plan, options)


if __name__ == "__main__":
    sys.exit(main())
