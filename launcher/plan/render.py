"""
What a person, or a program, is told about a plan: text and JSON of the very object that is
executed.

Values of variables whose names tell of a secret are hidden; the inherited environment is not
repeated, only what was taken out of it and what the user added.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.config.spec import JobSpec, Policy, list_field_paths
from pdrun.launcher.plan.environment import display_value, is_launcher_variable
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
    Return a plan as lines for a terminal; ``nodes`` are the plans of the nodes that a local one
    simulates.
    """
    rows = [
        ("job", plan.job),
        ("mode", f"{plan.mode}: {_MODE_TEXTS[plan.mode]}"),
        ("nodes", _format_nodes(plan)),
        ("scheduler", _format_scheduler(plan)),
        ("listen", plan.listen),
        ("program", shlex.join(_worker_argv(plan, nodes))),
        (
            "start",
            f"{plan.start_method.how}: {plan.start_method.reason}"
            if plan.start_method.reason
            else "",
        ),
        ("", plan.start_method.unused),
        ("folder", plan.cwd),
        ("backend", _format_backend(plan)),
        ("logs", _format_logs(plan.spec)),
        ("policy", _format_policy(plan.spec)),
        ("changes", _format_elasticity(plan.spec)),
        ("restarts", _format_restarts(plan.spec.policy)),
        (
            "hangs",
            f"no progress for {format_duration(hang)}"
            if (hang := plan.spec.policy.hang_timeout) is not None
            else "",
        ),
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
    return "\n".join(lines) + "\n"


def _format_nodes(plan: LaunchPlan) -> str:
    resources = plan.spec.resources
    count = (
        f"{resources.required_nodes} to {plan.nodes}"
        if resources.required_nodes < plan.nodes
        else str(plan.nodes)
    )
    spares = (
        f" and {resources.spares} that stand{'s' * (resources.spares == 1)} by"
        if resources.spares
        else ""
    )
    return (
        count
        + spares
        + (f"; this one is {plan.node}" if plan.node and plan.mode != "local" else "")
    )


def _format_elasticity(spec: JobSpec) -> str:
    """How an elastic job forms and changes; empty for one of a fixed size."""
    policy = spec.policy
    resources = spec.resources
    if not resources.is_elastic:
        return ""
    loss = "a lost node is replaced by one that stands by"
    if resources.required_nodes == resources.nodes:
        return loss
    late = (
        f"takes late nodes in after {format_duration(policy.grow)}"
        if policy.grow is not None
        else "late nodes wait"
    )
    least = f"{resources.required_nodes} node{'s' * (resources.required_nodes > 1)}"
    return f"goes on with {least}, begins after {format_duration(policy.gather)} of quiet, {late}"


def _format_restarts(policy: Policy) -> str:
    """What counts as a restart, where there may be any and that was said."""
    window = (
        f"within {format_duration(policy.restart_window)}"
        if policy.restart_window is not None
        else ""
    )
    only = f"after {format_ranks(policy.restart_on)} only" if policy.restart_on else ""
    never = f"never after {format_ranks(policy.no_restart_on)}" if policy.no_restart_on else ""
    if policy.max_restarts:
        return ", ".join(filter(None, (window, only, never)))
    return ""


def _format_scheduler(plan: LaunchPlan) -> str:
    if plan.scheduler is None:
        return ""
    if plan.scheduler.port == 0:
        return f"{plan.scheduler} (the system chooses the port)"
    return str(plan.scheduler)


def _format_backend(plan: LaunchPlan) -> str:
    by = f", collectives by {plan.collective}" if plan.collective else ""
    return f"{plan.backend}{by} ({plan.backend_reason.partition(';')[0]})"


def _worker_argv(plan: LaunchPlan, nodes: Sequence[LaunchPlan]) -> tuple[str, ...]:
    if plan.host_plan is not None:
        return program_argv(plan.spec.program, plan.host_plan.python)
    if plan.external_launch is not None:
        return program_argv(plan.spec.program, plan.external_launch.python)
    return next(worker.argv for node in (plan, *nodes) for worker in node.workers)


def _format_logs(spec: JobSpec) -> str:
    output = spec.output
    files = (
        f"{output.log_dir}/RUN/GENERATION/{output.log_name}.out and .err"
        if output.files
        else "no files"
    )
    return f"{files}; shown: {output.show_ranks}, prefix {output.prefix}"


def _format_policy(spec: JobSpec) -> str:
    policy = spec.policy
    limit = (
        f", at most {format_duration(policy.time_limit)}" if policy.time_limit is not None else ""
    )
    wait = format_duration(policy.start_timeout)
    grace = format_duration(policy.grace)
    return f"wait {wait} for all nodes, grace {grace}, {policy.max_restarts} restart(s){limit}"


def format_duration(value: float) -> str:
    """Return a duration as one would type it: ``90s``, ``10m``, ``2h``."""
    for size, unit in ((3600.0, "h"), (60.0, "m")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}s"


def _format_workers(node: LaunchPlan) -> list[str]:
    table = [("local rank", "device", "cpus", "threads", "sees")]
    table += [
        _worker_row(worker, node.visibility.get(worker.local_rank, {})) for worker in node.workers
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    padded = (zip(row, widths, strict=True) for row in table)
    return ["  " + "  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def _worker_row(worker: WorkerPlan, variables: Mapping[str, str]) -> tuple[str, str, str, str, str]:
    device = f"{worker.device.kind}:{worker.device_index}" if worker.device else "cpu"
    sees = " ".join(f"{name}={value}" for name, value in variables.items())
    return (
        str(worker.local_rank),
        device,
        format_ranks(worker.cpus) if worker.cpus else "not bound",
        str(worker.threads),
        sees or "-",
    )


def format_plan_json(plan: LaunchPlan, nodes: Sequence[LaunchPlan] = ()) -> str:
    """Return a plan as JSON, keys in a fixed order."""
    data = _plan_as_dict(plan)
    if nodes:
        data["simulated"] = [_plan_as_dict(node) for node in nodes]
    return json.dumps(data, indent=2) + "\n"


def _plan_as_dict(plan: LaunchPlan) -> dict[str, Any]:
    spec = asdict(plan.spec)
    spec["env"] = {name: display_value(name, value) for name, value in plan.spec.env.items()}
    spec["place"]["scheduler"] = (
        str(plan.spec.place.scheduler) if plan.spec.place.scheduler else None
    )
    return {
        "mode": plan.mode,
        "job": plan.job,
        "node": plan.node,
        "nodes": plan.nodes,
        "scheduler": str(plan.scheduler) if plan.scheduler else None,
        "listen": plan.listen,
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
        "starting": asdict(plan.start_method),
        "removed": list(plan.removed),
        "compared": dict(plan.compared),
        "notes": list(plan.notes),
        "spec": spec,
        "sources": dict(plan.sources),
    }


def explain_plan(plan: LaunchPlan, facts: Facts) -> str:
    """
    Return every effective value with its source, what was taken out, and why each thing was
    decided.
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
    lines += [f"  {plan.start_method.unused}"] if plan.start_method.unused else []
    lines += [f"  backend {plan.backend}: {plan.backend_reason.partition(';')[0]}"]
    lines += _explain_backends(facts, plan.backend)
    lines += [f"  {name} is taken out of the workers' environment" for name in plan.removed]
    return "\n".join(lines) + "\n"


def _explain_backends(facts: Facts, chosen: str = "") -> Iterable[str]:
    for found in facts.backends:
        if found.name != chosen:
            yield f"  backend {found.name}: {'usable' if found.present else 'refused'}: {found.reason}"


_DEVICE_TEXTS = {
    "auto": "auto (accelerators, else one worker)",
    "accelerators": "every accelerator",
    "cpus": "one a usable CPU",
    "accelerators-or-cpus": "accelerators, else one a usable CPU",
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
    return "-" if value in (None, "") else str(value)


# what this environment says
# -------------------------------------------------------------------------------------------

VARIABLE_FAMILIES = (
    ("pdrun", r"PDRUN_"),
    ("torchrun's options", r"PET_"),
    (
        "torchrun's workers",
        r"TORCHELASTIC_|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)$|ROLE_NAME$|NODE_RANK$|MASTER_(?:ADDR|PORT)$",
    ),
    ("MindSpore, Ascend", r"MS_|MSRUN_|RANK_(?:ID|SIZE|TABLE_FILE)$|DEVICE_ID$|ASCEND_"),
    ("Open MPI, PRRTE, MVAPICH", r"OMPI_|PRTE_|MV2_"),
    ("PMI, PMIx, MPICH, Intel MPI", r"PMI2?_|PMIX_|HYDRA_|HYDI_|I_MPI_|MPI_LOCAL"),
    ("Slurm", r"SLURM_"),
    ("PBS, LSF, SGE, Flux, PALS", r"PBS_|LSB_|LSF_|JSM_|PE_HOSTFILE$|SGE_|NSLOTS$|FLUX_|PALS_"),
    (
        "Kubernetes",
        r"KUBERNETES_SERVICE_HOST$|JOB_(?:COMPLETION_)?INDEX$|REPLICATED_JOB_|GLOBAL_REPLICAS$|PODS_PER_JOB$|V[CK]_|K_MPI_",
    ),
    (
        "SageMaker, AzureML, Vertex AI, TPU",
        r"SM_|TRAINING_JOB_NAME$|AZUREML_|AZ_BATCH|CLUSTER_SPEC$|TF_CONFIG$|CLOUD_ML_|TPU_|MEGASCALE_",
    ),
    ("device visibility", r"(?:CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES$|ZE_AFFINITY_MASK$"),
    ("threads", r"(?:OMP|MKL|OPENBLAS|KMP)_"),
)
"""
Who speaks in an environment, and a pattern for the beginnings of their names; the first that fits
counts.
"""


def group_variables(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the variables of launchers and schedulers that are set, by who set them."""
    found: dict[str, list[str]] = {}
    for family, pattern in VARIABLE_FAMILIES:
        taken = {name for names in found.values() for name in names}
        names = [name for name in sorted(environ) if name not in taken and re.match(pattern, name)]
        if names:
            found[family] = names
    return found


def format_environment(facts: Facts, chosen: str) -> str:
    """
    Return what ``pdrun env`` says: who speaks in the environment, devices, CPUs, versions,
    addresses.
    """
    cpus = facts.cpus
    quota = "no limit" if cpus.quota is None else f"limited to {cpus.quota:g} by the cgroup"
    lines = [
        f"pdrun      {facts.pdrun_version}",
        f"python     {facts.python_version} ({facts.python})",
        f"torch      {facts.torch_version or 'not installed for this python'}",
        f"host       {facts.hostname}, user id {facts.uid}",
        f"addresses  {', '.join(f'{address} ({name})' for name, address in facts.addresses)}",
        f"route      {facts.route_address or 'none to other machines'}",
        f"cpus       {format_ranks(cpus.cpus)}: {cpus.usable_cpus} usable, {quota}",
        f"topology   {len(cpus.cores) or 'unknown'} core(s), {len(cpus.numa) or 'unknown'} memory node(s)",
        f"use        {chosen}",
        "",
        "backends:",
    ]
    lines += [
        f"  {found.name:<5} {len(found.devices)} device(s): {found.reason}"
        if found.present
        else f"  {found.name:<5} refused: {found.reason}"
        for found in facts.backends
    ]
    lines += ["", "environment:"]
    for family, names in group_variables(facts.environ).items():
        lines.append(f"  {family}")
        for name in names:
            removed = "   (not passed on to workers)" if is_launcher_variable(name) else ""
            lines.append(f"    {name}={display_value(name, facts.environ[name])}{removed}")
    if lines[-1] == "environment:":
        lines.append("  no variable of any launcher or scheduler is set")
    return "\n".join(lines) + "\n"
