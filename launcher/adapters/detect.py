"""
Detect which launcher started this process. Pure: the environment is an argument.

Launchers can be nested, and child processes inherit variables, so several launchers may be present.
The innermost one that is not stale counts. The order of `ADAPTERS`: a worker of pdrun or torchrun,
the MPIs, a step of Slurm, pods, managed services, allocations. An allocation only provides hosts.
Ignored launchers are reported with the reason, and so is a contradiction by an outer launcher.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.errors import PdrunError, UsageError, did_you_mean
from pdrun.launcher.adapters import (
    ascend,
    batch,
    cloud,
    kubernetes,
    mpi,
    node_variables,
    slurm,
)
from pdrun.launcher.adapters.model import IgnoredLauncher, LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import Environ, LauncherAdapter

ADAPTERS: tuple[LauncherAdapter, ...] = (
    *(adapter.to_adapter() for adapter in (*mpi.WORKER_LAUNCHERS, *mpi.MPI_LAUNCHERS)),
    slurm.STEP_ADAPTER,
    kubernetes.PET_ADAPTER,
    ascend.MINDSPORE_ADAPTER,
    *kubernetes.POD_ADAPTERS,
    *cloud.CLOUD_ADAPTERS,
    *node_variables.NODE_ADAPTERS,
    node_variables.PADDLE_ADAPTER,
    node_variables.HAND_ADAPTER,
    ascend.ASCEND_ADAPTER,
    slurm.JOB_ADAPTER,
    *batch.ALLOCATION_ADAPTERS,
)
"""Innermost first."""
LAUNCHER_FAMILIES = {
    "slurm": ("slurm-step", "slurm-job"),
    "kubernetes": ("jobset", "indexed-job", "pytorch-operator"),
}
"""Names for several adapters."""
LAUNCHER_NAMES = (*(launcher.name for launcher in ADAPTERS), *LAUNCHER_FAMILIES)


def detect_launcher(environ: Environ, probes: Probes, launcher: str = "") -> LauncherInfo:
    """
    Return the values of the innermost launcher.

    Args:
        launcher: one of LAUNCHER_NAMES: read only this one, stale or not. ``none``: read no
            launcher. Empty: detect it.

    Raises:
        ConfigError: the variables of the launcher are malformed, incomplete or contradictory; the
            message names the variable.
        UsageError: no launcher has this name, or its variables are not set.
    """
    present = [adapter for adapter in ADAPTERS if adapter.is_present(environ)]
    if launcher == "none":
        ignored_all = (_make_ignored(adapter, environ, "--launcher none") for adapter in present)
        return LauncherInfo(ignored=tuple(ignored_all))
    if launcher:
        return _read_named(environ, probes, launcher, present)
    found: LauncherInfo | None = None
    ignored: list[IgnoredLauncher] = []
    notes: list[str] = []
    for adapter in present:
        if stale := adapter.why_stale(environ, probes):
            ignored.append(_make_ignored(adapter, environ, f"stale: {stale}"))
            notes.append(f"stale variables of {adapter.title} are ignored: {stale}")
        elif found is None:
            found = adapter.read(environ, probes)
        else:
            found, more = _merge_outer(found, adapter, environ, probes)
            ignored.append(
                _make_ignored(adapter, environ, f"outer: {found.title} takes precedence")
            )
            notes += more
    found = found or LauncherInfo()
    return replace(found, ignored=tuple(ignored), notes=(*found.notes, *notes))


def _read_named(
    environ: Environ, probes: Probes, launcher: str, present: list[LauncherAdapter]
) -> LauncherInfo:
    if launcher not in LAUNCHER_NAMES:
        raise UsageError(
            f"unknown launcher {launcher!r}",
            where="--launcher",
            hint=did_you_mean(launcher, LAUNCHER_NAMES)
            or f"known: {', '.join(LAUNCHER_NAMES)}, none",
        )
    wanted = LAUNCHER_FAMILIES.get(launcher, (launcher,))
    named = [adapter for adapter in present if adapter.name in wanted]
    if not named:
        raise UsageError(
            f"no variables of {launcher} are set", where="--launcher", hint="see pdrun env"
        )
    others = tuple(
        _make_ignored(adapter, environ, f"--launcher {launcher}")
        for adapter in present
        if adapter is not named[0]
    )
    return replace(named[0].read(environ, probes), ignored=others)


def _make_ignored(adapter: LauncherAdapter, environ: Environ, why: str) -> IgnoredLauncher:
    return IgnoredLauncher(adapter.name, why, adapter.variables(environ))


_ALLOCATION_FIELDS = ("hosts", "job_id", "attempt", "time_limit", "ends_at")
"""Fields that an inner launcher without them takes from an outer allocation."""


def _merge_outer(
    found: LauncherInfo, adapter: LauncherAdapter, environ: Environ, probes: Probes
) -> tuple[LauncherInfo, list[str]]:
    """
    Return the inner launcher's values, completed by those of the outer one, and contradictions.

    An outer launcher that cannot be read is not an error, because it does not count.
    """
    if adapter is node_variables.HAND_ADAPTER and found.launcher == kubernetes.RANK_PER_POD:
        return found, []  # both read the operator's variables
    try:
        outer = adapter.read(environ, probes)
    except PdrunError as error:
        return found, [f"{adapter.title}, an outer launcher, is not read: {error}"]
    notes = []
    pairs = ((outer.rank, found.rank), (outer.world, found.world))
    differs = any(one is not None and other is not None and one != other for one, other in pairs)
    if outer.kind == "task" and found.kind == "task" and differs:
        notes.append(
            f"{found.title} gives rank {_format_rank(found)}, {outer.title} gives"
            f" {_format_rank(outer)}: the inner launcher is used (--launcher selects another)"
        )
    if outer.kind == "allocation" and found.launcher not in ("pdrun", "torchrun"):
        missing = [
            name for name in _ALLOCATION_FIELDS if not getattr(found, name) and getattr(outer, name)
        ]
        values = {name: getattr(outer, name) for name in missing}
        sources = {**found.sources, **{name: outer.sources.get(name, "") for name in missing}}
        found = replace(found, **values, sources=sources)
    return found, notes


def _format_rank(found: LauncherInfo) -> str:
    rank, world = ("?" if number is None else number for number in (found.rank, found.world))
    return f"{rank} of {world}"
