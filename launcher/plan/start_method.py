"""
Choose between fork and exec before anything starts. Pure.

Workers that are forked from a process with torch imported need no import of their own. Fork is
chosen if it differs from exec only in the points that docs/starting.md lists. In doubt exec is
chosen, which only costs time. If a warm process (`pdrun warm`) has imported what the job's fork
server would import, the job is forked from it. A fork server may still be unusable (a plug-in of
torch starts threads or opens a device at import). Then the supervisor uses exec, and the agent
prints the reason. The commands of parameter servers are made here, too: they are forked if workers
are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdrun.endpoint import parse_endpoint
from pdrun.errors import UsageError
from pdrun.launcher.common.server_places import count_servers, servers_of_node
from pdrun.launcher.config.spec import JobSpec, Sources
from pdrun.launcher.plan.model import Facts, LaunchPlan, StartMethod
from pdrun.launcher.plan.program import program_argv
from pdrun.launcher.stdlib_only import import_env
from pdrun.launcher.supervisor.boot import BASE_MODULES, OPTIMIZER_MODULES, fork_server_argv
from pdrun.launcher.supervisor.events import (
    NOTE_VARIABLE,
    WarmProcess,
    WorkerCommand,
    slot_of_server,
)

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.messages import Assign

_FORK_SERVER_SLOT = -1
SERVER_MODULE = "pdrun.parallel.servers.main"


def choose_start_method(
    spec: JobSpec,
    facts: Facts,
    sources: Sources,
    environ: Mapping[str, str],
    visibility: Mapping[int, Iterable[str]],
) -> StartMethod:
    """
    Return how the workers are started.

    Args:
        environ: environment that all workers share.
        visibility: local rank -> names of the variables that only this worker gets.

    Raises:
        UsageError: ``--start fork`` is not possible.
    """
    method = _fork_or_exec(spec, facts, sources, environ, visibility)
    if method.how == "exec" or not spec.program.warm or not facts.warm:
        return method
    argv = program_argv(spec.program, facts.python)
    unused = []
    for warm in facts.warm:
        problem = why_unusable(warm, argv, method.modules, facts.torch_version, environ)
        if not problem:
            reason = f"from the warm process {warm.pid} with torch {warm.torch_version}"
            if method.strict:
                reason = f"--start fork, {reason}"
            return replace(method, reason=reason, warm=warm.socket)
        unused.append(f"the warm process {warm.pid} is not used: {problem}")
    return replace(method, unused="; ".join(unused))


def why_unusable(
    warm: WarmProcess,
    argv: Sequence[str],
    modules: Iterable[str],
    torch_version: str,
    environ: Mapping[str, str],
) -> str:
    """
    Return why a job cannot be forked from a warm process, or the empty string.

    Args:
        argv: a worker's command line.
        modules: modules that the job's own fork server would import.
        torch_version: torch version of the workers' interpreter; empty: unknown.
        environ: environment that all workers share.
    """
    if warm.python != argv[0]:
        return f"its interpreter is {warm.python}"
    if argv[1:2] == ("-P",):
        return "workers of a function run with -P"
    if torch_version and torch_version != warm.torch_version:
        return f"it has torch {warm.torch_version}, but {torch_version} is installed"
    missing = [name for name in modules if name not in warm.modules]
    if missing:
        return f"it has not imported {missing[0]}"
    if any(not part.startswith("/") for part in (environ.get("PYTHONPATH") or "/").split(":")):
        return "PYTHONPATH has a relative folder"
    job_env = import_env.import_environment(dict(environ))
    names = set(warm.variables)
    for name in job_env:
        if warm.depends_on_all:
            is_relevant = not import_env.is_session_variable(name)
        else:
            is_relevant = import_env.is_import_variable(name)
        if is_relevant:
            names.add(name)
    for name in sorted(names):
        is_per_worker = import_env.PER_WORKER_VARIABLES.fullmatch(name)
        if job_env.get(name) != warm.variables.get(name) and not is_per_worker:
            return f"{name} has another value, which affects the import"
    return warm.unfit


def _fork_or_exec(
    spec: JobSpec,
    facts: Facts,
    sources: Sources,
    environ: Mapping[str, str],
    visibility: Mapping[int, Iterable[str]],
) -> StartMethod:
    """Choose between fork and exec without regard to warm processes."""
    if spec.program.start == "exec":
        return StartMethod("exec", "--start exec")
    problem = _why_unforkable(spec, facts, environ, visibility)
    modules: tuple[str, ...] = BASE_MODULES
    if facts.uses_optimizer:
        modules += OPTIMIZER_MODULES
    if spec.program.start == "fork":
        if problem:
            raise UsageError(
                f"workers cannot be forked: {problem}",
                where=sources.get("program.start", "--start"),
            )
        return StartMethod("fork", "--start fork", modules, strict=True)
    problem = problem or _why_not_useful(facts)
    if problem:
        return StartMethod("exec", problem)
    reason = f"one process imports {', '.join(modules)} and forks the workers"
    return StartMethod("fork", reason, modules)


def _why_unforkable(
    spec: JobSpec, facts: Facts, environ: Mapping[str, str], visibility: Mapping[int, Iterable[str]]
) -> str:
    if spec.program.kind == "command":
        return "a command runs without Python"
    if facts.exec_reason:
        return facts.exec_reason
    if not facts.torch_version:
        return "torch is not installed for the workers' interpreter"
    different = set()
    for names in visibility.values():
        for name in names:
            if not import_env.PER_WORKER_VARIABLES.fullmatch(name):
                different.add(name)
    if different:
        return f"{min(different)} differs between the workers and may affect the import"
    return import_env.why_exec_needed(dict(environ))


def _why_not_useful(facts: Facts) -> str:
    if not facts.imports_torch:
        return "the program does not import torch"
    if facts.late_variable:
        return f"{facts.late_variable} before the import of torch, which has no effect in a fork"
    return ""


def worker_start_option(method: StartMethod) -> Literal["exec", "auto", "fork"]:
    """Return the start option that the supervisor gets for each worker."""
    if method.how == "exec":
        return "exec"
    if method.strict:
        return "fork"
    return "auto"


def fork_server_command(plan: LaunchPlan) -> WorkerCommand:
    """
    Return the command of the fork server. It is as long as a worker's, so that a forked worker can
    overwrite it with its own command line.
    """
    python, *flags = plan.workers[0].argv[:2]
    argv = fork_server_argv(
        python,
        plan.start_method.modules,
        plan.workers[0].argv,
        [flag for flag in flags if flag == "-P"],
    )
    env = import_env.import_environment({**plan.base_env, **plan.spec.env})
    return WorkerCommand(_FORK_SERVER_SLOT, tuple(argv), env, plan.cwd)


def make_worker_variables(plan: LaunchPlan, assign: Assign, key: bytes) -> dict[str, str]:
    """Return the variables by which a worker finds the servers; empty without servers."""
    count = count_servers(plan.spec.resources.servers, assign.nodes)
    if not count:
        return {}
    return {"PDRUN_SERVER_COUNT": str(count), "PDRUN_SERVER_KEY": key.hex()}


def make_server_commands(
    plan: LaunchPlan, assign: Assign, key: bytes, folder: str
) -> list[WorkerCommand]:
    """
    Return the commands of this node's servers in a generation.

    Args:
        key: of the data channel.
        folder: a private folder for their unix sockets.
    """
    mine = servers_of_node(plan.spec.resources.servers, assign.nodes, assign.node_rank)
    if not mine:
        return []
    master = parse_endpoint(assign.master, where="the scheduler's assignment")
    common: dict[str, str] = {
        **plan.base_env,
        **plan.spec.env,
        **make_worker_variables(plan, assign, key),
        "PDRUN_SERVER_FOLDER": folder,
        "PDRUN_SERVER_LISTEN": plan.listen if assign.nodes > 1 else "",
        "PDRUN_GENERATION": str(assign.generation),
        "WORLD_SIZE": str(assign.world_size),
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
    }
    if plan.spec.place.port_range is not None:
        first, last = plan.spec.place.port_range
        common["PDRUN_PORT_RANGE"] = f"{first}-{last}"
    commands = []
    for index, server in enumerate(mine):
        cpus = plan.server_cpus[index] if index < len(plan.server_cpus) else ()
        env = {
            **common,
            "PDRUN_SERVER_RANK": str(server),
            NOTE_VARIABLE: f"{folder}/server-{server}-{assign.generation}.json",
            "OMP_NUM_THREADS": str(max(1, len(cpus))),
        }
        # forked if workers are, since torch is imported there; -P: no module of the folder counts
        start: Literal["exec", "auto"] = "auto" if plan.start_method.how == "fork" else "exec"
        slot = slot_of_server(assign.generation, server)
        argv = (find_interpreter(plan), "-P", "-m", SERVER_MODULE)
        commands.append(WorkerCommand(slot, argv, env, "/", cpus, start))
    return commands


def find_interpreter(plan: LaunchPlan) -> str:
    """Return the interpreter that has the workers' torch."""
    program = plan.workers[0].argv[0]
    if plan.spec.program.kind != "command" or Path(program).name.startswith("python"):
        return program
    return sys.executable
