"""
Fork or exec? Decided before anything starts, from what was asked and what is true. Pure.

A fork from one process that has imported torch saves every worker its import. It is chosen where
nothing can differ from exec but what docs/starting.md lists; in doubt, exec, which costs time only.
Where a warm process has imported just what the job's own starter would (`pdrun warm`), the job is
forked from that one. A starter may still turn out unfit (a plug-in of torch that starts threads or
opens a device at import): then the keeper executes, and the agent says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pdrun.errors import UsageError
from pdrun.launcher.config.spec import JobSpec, Sources
from pdrun.launcher.plan.model import Facts, LaunchPlan, StartMethod
from pdrun.launcher.plan.program import program_argv
from pdrun.launcher.stdlib_only import import_env
from pdrun.launcher.supervisor.boot import OPTIMIZER_MODULES, BASE_MODULES, fork_server_argv
from pdrun.launcher.supervisor.events import WarmProcess, WorkerCommand

_FORK_SERVER_SLOT = -1


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
        environ: what all workers have in common.
        visibility: local rank -> names of the variables that are its own.

    Raises:
        UsageError: forks were asked for and are impossible.
    """
    found = _fork_or_exec(spec, facts, sources, environ, visibility)
    if found.how == "exec" or not spec.program.warm or not facts.warm:
        return found
    argv = program_argv(spec.program, facts.python)
    why = {
        warm.pid: why_unusable(warm, argv, found.modules, facts.torch_version, environ)
        for warm in facts.warm
    }
    for warm in facts.warm:
        if not why[warm.pid]:
            reason = (
                f"from the warm process {warm.pid}, which has imported torch {warm.torch_version}"
            )
            return replace(
                found, reason=f"asked for, {reason}" if found.strict else reason, warm=warm.socket
            )
    return replace(
        found,
        unused="; ".join(
            f"the warm process {pid} is not used: {text}" for pid, text in why.items()
        ),
    )


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
        modules: what the job's own starter would import.
        torch_version: of the workers' interpreter as far as known, or empty.
        environ: what all workers have in common.
    """
    if warm.python != argv[0]:
        return f"its interpreter is {warm.python}"
    if argv[1:2] == ("-P",):
        return "workers of a function run with -P"
    if torch_version and torch_version != warm.torch_version:
        return f"it has torch {warm.torch_version}, and {torch_version} is installed"
    missing = [name for name in modules if name not in warm.modules]
    if missing:
        return f"it has not imported {missing[0]}"
    if any(not part.startswith("/") for part in (environ.get("PYTHONPATH") or "/").split(":")):
        return "PYTHONPATH names a folder relative to where the job starts"
    wanted = import_env.import_environment(dict(environ))
    if warm.depends_on_all:
        names = {
            *warm.variables,
            *(name for name in wanted if not import_env.is_session_variable(name)),
        }
    else:
        names = {*warm.variables, *filter(import_env.is_import_variable, wanted)}
    for name in sorted(names):
        if wanted.get(name) != warm.variables.get(
            name
        ) and not import_env.PER_WORKER_VARIABLES.fullmatch(name):
            return f"{name} has another value, which counts at import"
    return warm.unfit


def _fork_or_exec(
    spec: JobSpec,
    facts: Facts,
    sources: Sources,
    environ: Mapping[str, str],
    visibility: Mapping[int, Iterable[str]],
) -> StartMethod:
    """Fork or exec, whatever warm process there is."""
    asked = spec.program.start
    if asked == "exec":
        return StartMethod("exec", "asked for")
    why = _why_unforkable(spec, facts, environ, visibility)
    modules = BASE_MODULES + (OPTIMIZER_MODULES if facts.uses_optimizer else ())
    if asked == "fork":
        if why:
            raise UsageError(
                f"workers cannot be forked: {why}", where=sources.get("program.start", "--start")
            )
        return StartMethod("fork", "asked for", modules, strict=True)
    why = why or _why_not_useful(facts)
    if why:
        return StartMethod("exec", why)
    return StartMethod(
        "fork", f"one process imports {', '.join(modules)} and forks the workers", modules
    )


def _why_unforkable(
    spec: JobSpec, facts: Facts, environ: Mapping[str, str], visibility: Mapping[int, Iterable[str]]
) -> str:
    if spec.program.kind == "command":
        return "a command is executed as it is"
    if facts.exec_reason:
        return facts.exec_reason
    if not facts.torch_version:
        return "torch is not installed for the workers' interpreter"
    own = sorted(
        {
            name
            for names in visibility.values()
            for name in names
            if not import_env.PER_WORKER_VARIABLES.fullmatch(name)
        }
    )
    if own:
        return f"{own[0]} differs between the workers and may count at import"
    return import_env.why_exec_needed(dict(environ))


def _why_not_useful(facts: Facts) -> str:
    if not facts.imports_torch:
        return "the program does not import torch"
    if facts.late_variable:
        return f"{facts.late_variable} before its import of torch, too late in a fork"
    return ""


def worker_start_option(starting: StartMethod) -> Literal["exec", "auto", "fork"]:
    """Return what the keeper is told for each worker."""
    if starting.how == "exec":
        return "exec"
    return "fork" if starting.strict else "auto"


def fork_server_command(plan: LaunchPlan) -> WorkerCommand:
    """
    Return the command of the starter, as long as a worker's, so that it can carry that one's words
    later.
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
