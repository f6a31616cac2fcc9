"""
The last look before a node says that it can start: cheap, and before anything runs anywhere.

What was true when the plan was made may have changed while the nodes came together (a file system
that is not mounted here, a full disk, a folder of another user).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrun.errors import EXIT_CONFIG, ConfigError
from pdrun.launcher.agent.interfaces import WorkerOutput
from pdrun.launcher.common import files as paths
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.program import look


@dataclass(frozen=True)
class Preflight:
    """What the last look found."""

    code: int = 0
    """Exit code of what is wrong; 0 when this node can start."""
    reason: str = ""
    imports_torch: bool = False
    """The program's text mentions torch: its store will be wanted."""


def preflight(plan: LaunchPlan, output: WorkerOutput) -> Preflight:
    """Return whether this node can start its workers; makes the log folder."""
    if not paths.is_folder(plan.cwd):
        return Preflight(EXIT_CONFIG, f"the working folder {plan.cwd} is not there")
    found = look(plan.spec.program, plan.cwd, {**plan.base_env, **plan.spec.env})
    if found.error:
        return Preflight(found.code or EXIT_CONFIG, found.error)
    try:
        output.prepare()
    except ConfigError as error:
        return Preflight(error.exit_code, str(error))
    return Preflight(imports_torch=found.imports_torch)
