"""
One agent among the tasks of mpirun or srun: ``python -m pdrun.launcher.launch.task_main`` (see
`pdrun.launcher.controller.external`).

PDRUN_ORDER says what to do, PDRUN_TOKEN is the secret; both are taken out of the environment at
once. The launcher's own variables say which task this is. It ends with 0 once the job has its
verdict, whatever that is: the front knows it, and mpirun would make a drama of anything else.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from pdrun import process_setup

if TYPE_CHECKING:
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.rendezvous.protocol.security import Secret


def main() -> int:
    """Run the agent; 0 unless it never took part. Never raises."""
    process_setup.setup_process()
    from pdrun import async_writer
    from pdrun.errors import PdrunError

    try:
        return _run()
    except PdrunError as error:
        async_writer.write_message(f"{os.uname().nodename}: {error}")
        return error.exit_code
    except Exception as error:
        from pdrun.launcher.common.exit import fault

        return fault(error)


def _run() -> int:
    from pdrun.errors import ConfigError
    from pdrun.launcher.adapters.detect import detect
    from pdrun.launcher.adapters.probes import real
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.controller import payload as order
    from pdrun.launcher.plan import external as through
    from pdrun.rendezvous.protocol.security import parse_token

    text = os.environ.pop(through.ORDER, "")
    token = process_setup.take_token()
    if not text:
        raise ConfigError("is not set: the launcher did not pass it on", where=through.ORDER)
    told = order.decode(text)
    found = detect(os.environ, real())
    if found.kind != "task" or found.rank is None:
        raise ConfigError("no launcher says which task this is", where="task_main")
    os.environ.update(told["env"])
    folder = str(told["folder"])
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be entered: {error.strerror}", where="--chdir"
        ) from None
    os.environ["PWD"] = folder
    spec = JobSpec.from_json(told["spec"])
    if token is None and not spec.place.insecure:
        raise ConfigError("is not set: the launcher did not pass it on", where=through.TOKEN)
    return _agent(
        told, spec, found.rank, parse_token(token, where=through.TOKEN) if token else None
    )


def _agent(told: dict[str, Any], spec: JobSpec, rank: int, secret: Secret | None) -> int:
    from dataclasses import replace

    from pdrun.launcher.common import network
    from pdrun.launcher.launch.agent_options import Seat
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.plan import external as through
    from pdrun.launcher.plan import facts, placement
    from pdrun.launcher.plan import hosts as fan
    from pdrun.launcher.plan.plan import plan
    from pdrun.names import make_name

    hosts = spec.place.hosts
    host = os.uname().nodename
    index = through.host_index(hosts, network.among(hosts, host), rank) if hosts else rank
    resources = (
        placement.on_host(spec.resources, hosts[index], "--hosts") if hosts else spec.resources
    )
    name = fan.named(hosts)[index][1] if hosts else make_name(host)
    place = replace(spec.place, hosts=(), node_rank=index, node_name=name)
    spec = replace(spec, place=place, resources=resources)
    made = plan(spec, facts.gather(spec), {**told["sources"], "place.node_rank": told["how"]})
    seat = Seat(
        secret=secret,
        console=Console.from_json(told),
        quiet=index > 0,
        run=str(told["run"]),
        stdin=False,
    )
    execute(made, seat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
