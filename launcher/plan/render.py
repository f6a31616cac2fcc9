"""
A plan as text (``--dry-run``), as JSON (``--json``) and with sources (``--explain``). Pure.

Values of variables with a secret's name are hidden. Of the inherited environment only the removed
variables and the user's additions are printed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.common.server_places import describe_node_servers, describe_servers
from pdrun.launcher.config.spec import JobSpec, Policy, list_field_paths
from pdrun.launcher.plan.environment import display_value, format_variables
from pdrun.launcher.plan.external import describe_external
from pdrun.launcher.plan.hosts import describe_hosts
from pdrun.launcher.plan.model import Facts, LaunchPlan, WorkerPlan
from pdrun.launcher.plan.program import program_argv

_MODE_TEXTS = {
    "single": "one node, nothing listens",
    "local": "all nodes are simulated on this machine",
    "head": "this node runs the scheduler",
    "join": "this node joins the scheduler",
    "hosts": "this process starts an agent on each host",
    "external": "this process runs the scheduler, another launcher starts the agents",
}


def format_plan(plan: LaunchPlan, nodes: Sequence[LaunchPlan] = ()) -> str:
    """
    Return a plan as text for a terminal.

    Args:
        nodes: plans of the nodes that a ``local`` plan simulates.
    """
    start = ""
    if plan.start_method.reason:
        start = f"{plan.start_method.how}: {plan.start_method.reason}"
    hangs = ""
    if plan.spec.policy.hang_timeout is not None:
        hangs = f"no progress for {format_duration(plan.spec.policy.hang_timeout)}"
    rows = [
        ("job", plan.job),
        ("mode", f"{plan.mode}: {_MODE_TEXTS[plan.mode]}"),
        ("nodes", _format_nodes(plan)),
        ("scheduler", _format_scheduler(plan)),
        ("listen", plan.listen),
        ("store", _format_store(plan)),
        ("program", shlex.join(_worker_argv(plan, nodes))),
        ("start", start),
        ("", plan.start_method.unused),
        ("folder", plan.cwd),
        ("backend", _format_backend(plan)),
        ("interface", format_variables(plan.interfaces) if plan.interfaces else ""),
        ("servers", describe_servers(plan.spec.resources.servers, plan.nodes)),
        ("logs", _format_logs(plan.spec)),
        ("policy", _format_policy(plan.spec)),
        ("changes", _format_elasticity(plan.spec)),
        ("restarts", _format_restarts(plan.spec.policy)),
        ("hangs", hangs),
        *(("set", f"{name}={display_value(name, value)}") for name, value in plan.spec.env.items()),
        ("removed", ", ".join(plan.removed) or "-"),
    ]
    lines = [f"{name:<10} {value}" for name, value in rows if value]
    if plan.host_plan is not None:
        return "\n".join(lines) + "\n" + describe_hosts(plan)
    if plan.external_launch is not None:
        return "\n".join(lines) + "\n" + describe_external(plan)
    for node in nodes or (plan,):
        lines += ["", f"{node.node}: {len(node.workers)} worker(s)", *_format_workers(node)]
        lines += describe_node_servers(
            node.spec.resources.servers, node.nodes, node.spec.place.node_rank, node.server_cpus
        )
    return "\n".join(lines) + "\n"


def _format_nodes(plan: LaunchPlan) -> str:
    resources = plan.spec.resources
    text = str(plan.nodes)
    if resources.required_nodes < plan.nodes:
        text = f"{resources.required_nodes} to {plan.nodes}"
    if resources.spares:
        text += f" and {resources.spares} spare node(s)"
    if plan.node and plan.mode != "local":
        text += f"; this node is {plan.node}"
    return text


def _format_elasticity(spec: JobSpec) -> str:
    """Return how an elastic job starts and changes; empty for a job of fixed size."""
    policy = spec.policy
    resources = spec.resources
    if not resources.is_elastic:
        return ""
    if resources.required_nodes == resources.nodes:
        return "a spare node replaces a lost one"
    late = "late nodes wait for a restart"
    if policy.grow is not None:
        late = f"late nodes join after {format_duration(policy.grow)}"
    start = f"starts {format_duration(policy.gather)} after the last join"
    return f"continues with {resources.required_nodes} node(s), {start}, {late}"


def _format_restarts(policy: Policy) -> str:
    """Return the conditions of restarts; empty without restarts or conditions."""
    if not policy.max_restarts:
        return ""
    conditions = []
    if policy.restart_window is not None:
        conditions.append(f"within {format_duration(policy.restart_window)}")
    if policy.restart_on:
        conditions.append(f"only after exit code {format_ranks(policy.restart_on)}")
    if policy.no_restart_on:
        conditions.append(f"never after exit code {format_ranks(policy.no_restart_on)}")
    return ", ".join(conditions)


def _format_scheduler(plan: LaunchPlan) -> str:
    if plan.scheduler is None:
        return ""
    if plan.scheduler.port == 0:
        return f"{plan.scheduler} (the system chooses the port)"
    return str(plan.scheduler)


def _format_store(plan: LaunchPlan) -> str:
    """Return where torch's store listens, if the user has set it."""
    if plan.store is None:
        return ""
    return f"{plan.store.endpoint} by {plan.store.source}"


def _format_backend(plan: LaunchPlan) -> str:
    text = plan.backend
    if plan.collective:
        text += f", collectives by {plan.collective}"
    return f"{text} ({plan.backend_reason.partition(';')[0]})"


def _worker_argv(plan: LaunchPlan, nodes: Sequence[LaunchPlan]) -> tuple[str, ...]:
    if plan.host_plan is not None:
        return program_argv(plan.spec.program, plan.host_plan.python)
    if plan.external_launch is not None:
        return program_argv(plan.spec.program, plan.external_launch.python)
    return next(worker.argv for node in (plan, *nodes) for worker in node.workers)


def _format_logs(spec: JobSpec) -> str:
    output = spec.output
    files = "no files"
    if output.files:
        files = f"{output.log_dir}/RUN/GENERATION/{output.log_name}.out and .err"
    shown = output.show_ranks
    if output.show_stderr:
        shown += f" (stderr: {output.show_stderr})"
    return f"{files}; shown: {shown}, prefix {output.prefix}"


def _format_policy(spec: JobSpec) -> str:
    policy = spec.policy
    wait = format_duration(policy.start_timeout)
    grace = format_duration(policy.grace)
    text = f"wait {wait} for all nodes, grace {grace}, {policy.max_restarts} restart(s)"
    if policy.time_limit is not None:
        text += f", time limit {format_duration(policy.time_limit)}"
    return text


def format_duration(value: float) -> str:
    """Return a duration in the form of an option: ``90s``, ``10m``, ``2h``."""
    for size, unit in ((3600.0, "h"), (60.0, "m")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}s"


def _format_workers(node: LaunchPlan) -> list[str]:
    table = [("local rank", "device", "cpus", "threads", "visibility")]
    table += [
        _worker_row(worker, node.visibility.get(worker.local_rank, {})) for worker in node.workers
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    padded = (zip(row, widths, strict=True) for row in table)
    return ["  " + "  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def _worker_row(worker: WorkerPlan, variables: Mapping[str, str]) -> tuple[str, str, str, str, str]:
    device = "cpu"
    if worker.device:
        device = f"{worker.device.kind}:{worker.device_index}"
    cpus = "not bound"
    if worker.cpus:
        cpus = format_ranks(worker.cpus)
    visibility = " ".join(f"{name}={value}" for name, value in variables.items())
    return (str(worker.local_rank), device, cpus, str(worker.threads), visibility or "-")


def format_plan_json(plan: LaunchPlan, nodes: Sequence[LaunchPlan] = ()) -> str:
    """Return a plan as JSON, keys in a fixed order."""
    data = _plan_as_dict(plan)
    if nodes:
        data["simulated"] = [_plan_as_dict(node) for node in nodes]
    return json.dumps(data, indent=2) + "\n"


def _plan_as_dict(plan: LaunchPlan) -> dict[str, Any]:
    spec = asdict(plan.spec)
    spec["env"] = {name: display_value(name, value) for name, value in plan.spec.env.items()}
    spec["place"]["scheduler"] = _text_or_none(plan.spec.place.scheduler)
    return {
        "mode": plan.mode,
        "job": plan.job,
        "node": plan.node,
        "nodes": plan.nodes,
        "scheduler": _text_or_none(plan.scheduler),
        "listen": plan.listen,
        "interfaces": dict(plan.interfaces),
        "cwd": plan.cwd,
        "backend": plan.backend,
        "backend_reason": plan.backend_reason,
        "collective": plan.collective,
        "workers": [
            {
                "local_rank": worker.local_rank,
                "argv": list(worker.argv),
                "device": worker.device.name if worker.device else None,
                "device_index": worker.device_index,
                "cpus": list(worker.cpus),
                "threads": worker.threads,
                "visibility": dict(plan.visibility.get(worker.local_rank, {})),
            }
            for worker in plan.workers
        ],
        "server_cpus": [list(cpus) for cpus in plan.server_cpus],
        "starting": asdict(plan.start_method),
        "removed": list(plan.removed),
        "compared": dict(plan.compared),
        "notes": list(plan.notes),
        "spec": spec,
        "sources": dict(plan.sources),
    }


def _text_or_none(value: object) -> str | None:
    if value is None:
        return None
    return str(value)


def explain_plan(plan: LaunchPlan, facts: Facts) -> str:
    """
    Return every effective value with its source, the removed variables, and the reasons.
    """
    rows = [
        (path, _format_value(plan.spec, path, facts.python), plan.sources.get(path, "default"))
        for path in list_field_paths()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"{path:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {source}"
        for path, value, source in rows
    ]
    lines += ["", "why:", *(f"  {note}" for note in plan.notes)]
    lines += [f"  start {plan.start_method.how}: {plan.start_method.reason}"]
    if plan.start_method.unused:
        lines.append(f"  {plan.start_method.unused}")
    lines += [f"  backend {plan.backend}: {plan.backend_reason.partition(';')[0]}"]
    lines += _explain_backends(facts, plan.backend)
    lines += [f"  {name} is removed from the workers' environment" for name in plan.removed]
    return "\n".join(lines) + "\n"


def _explain_backends(facts: Facts, chosen: str = "") -> Iterable[str]:
    for found in facts.backends:
        if found.name != chosen:
            state = "usable" if found.present else "refused"
            yield f"  backend {found.name}: {state}: {found.reason}"


_DEVICE_TEXTS = {
    "auto": "auto (one per accelerator, or one worker)",
    "accelerators": "one per accelerator",
    "cpus": "one per usable CPU",
    "accelerators-or-cpus": "one per accelerator, or one per usable CPU",
}


def _format_value(spec: JobSpec, path: str, python: str) -> str:
    group, _, name = path.rpartition(".")
    value = getattr(getattr(spec, group) if group else spec, name)
    if path == "env":
        return " ".join(f"{key}={display_value(key, text)}" for key, text in value.items()) or "-"
    if path == "program.python" and spec.program.kind != "command":
        return spec.program.python or python
    if path in ("policy.restart_on", "policy.no_restart_on"):
        return format_ranks(value) if value else "-"
    if path == "resources.min_nodes":
        return str(spec.resources.required_nodes)
    if path == "resources.devices":
        return _DEVICE_TEXTS.get(str(value), str(value))
    if path == "program.args":
        return shlex.join(value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_duration(value)
    if value in (None, ""):
        return "-"
    return str(value)
