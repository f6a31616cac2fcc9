"""
One agent among the tasks of mpirun or srun: ``python -m pdrun.launcher.launch.task_main``.

`pdrun.launcher.controller.external` has it started. PDRUN_ORDER describes the agent, PDRUN_TOKEN is
the secret; both are removed from the environment first. The launcher's variables give the rank of
the task.

The exit code is 0 once the job has a verdict, whatever the verdict is: the controller knows it, and
mpirun would report any other code as its own failure.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdrun import process_setup

if TYPE_CHECKING:
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.rendezvous.protocol.security import Secret


def main() -> int:
    """Run the agent; return 0 unless it never joined the job. Never raises."""
    process_setup.setup_process()
    from pdrun import async_writer
    from pdrun.errors import PdrunError

    try:
        return _run_task()
    except PdrunError as error:
        async_writer.write_message(f"{os.uname().nodename}: {error}")
        return error.exit_code
    except Exception as error:
        from pdrun.launcher.common.exit import report_fault

        return report_fault(error)


def _run_task() -> int:
    from pdrun.errors import ConfigError
    from pdrun.launcher.adapters.detect import detect_launcher
    from pdrun.launcher.adapters.probes import make_probes
    from pdrun.launcher.config.spec import JobSpec
    from pdrun.launcher.controller.payload import decode
    from pdrun.launcher.plan.external import PAYLOAD_VARIABLE, TOKEN_VARIABLE
    from pdrun.rendezvous.protocol.security import parse_token

    text = os.environ.pop(PAYLOAD_VARIABLE, "")
    token = process_setup.take_token()
    if not text:
        raise ConfigError("is not set: the launcher did not forward it", where=PAYLOAD_VARIABLE)
    payload = decode(text)
    launcher = detect_launcher(os.environ, make_probes())
    if launcher.kind != "task" or launcher.rank is None:
        raise ConfigError("no launcher's variables give the rank of this task", where="task_main")
    os.environ.update(payload["env"])
    _enter_folder(str(payload["folder"]))
    spec = JobSpec.from_json(payload["spec"])
    if token is None and not spec.place.insecure:
        raise ConfigError("is not set: the launcher did not forward it", where=TOKEN_VARIABLE)
    secret = parse_token(token, where=TOKEN_VARIABLE) if token else None
    return _run_agent(payload, spec, launcher.rank, secret)


def _enter_folder(folder: str) -> None:
    from pdrun.errors import ConfigError

    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot change to the folder {folder}: {error.strerror}", where="--chdir"
        ) from None
    os.environ["PWD"] = folder


def _run_agent(payload: dict[str, Any], spec: JobSpec, rank: int, secret: Secret | None) -> int:
    from pdrun.launcher.launch.agent_options import AgentOptions
    from pdrun.launcher.launch.execute import execute
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.plan.facts import gather_facts
    from pdrun.launcher.plan.plan import make_plan

    spec = _spec_of_task(spec, rank)
    node_rank = spec.place.node_rank or 0
    sources = {**payload["sources"], "place.node_rank": payload["how"]}
    plan = make_plan(spec, gather_facts(spec), sources)
    options = AgentOptions(
        secret=secret,
        console=Console.from_json(payload),
        is_quiet=node_rank > 0,
        run=str(payload["run"]),
        may_read_stdin=False,
    )
    execute(plan, options)
    return 0


def _spec_of_task(spec: JobSpec, rank: int) -> JobSpec:
    """Return the specification of this node: its rank, name and devices in the list of hosts."""
    from pdrun.launcher.common.network import find_own_names
    from pdrun.launcher.plan.external import find_node_rank
    from pdrun.launcher.plan.hosts import name_hosts
    from pdrun.launcher.plan.placement import resources_on_host
    from pdrun.text import make_name

    hosts = spec.place.hosts
    hostname = os.uname().nodename
    names: tuple[str, ...] = ()
    if hosts:
        own_names = find_own_names(((host.name, host.address) for host in hosts), hostname)
        rank = find_node_rank(hosts, own_names, rank)
        names = tuple(node for _, node in name_hosts(hosts))
        name = names[rank]
        resources = resources_on_host(spec.resources, hosts[rank], "--hosts")
    else:
        name = make_name(hostname)
        resources = spec.resources
    cluster = replace(spec.place, hosts=(), node_rank=rank, node_name=name, node_names=names)
    return replace(spec, place=cluster, resources=resources)


if __name__ == "__main__":
    sys.exit(main())
