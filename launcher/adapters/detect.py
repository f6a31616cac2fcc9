"""
Which launcher started this process: one table, innermost first, over an environment that is passed
in.

Launchers nest, and what is inherited stays in the environment, so several rows may fit. The
innermost one counts that is not stale: a worker of pdrun or torchrun, then the MPIs, then a step of
Slurm, kubernetes, managed cloud, and last the allocations, which give hosts only. What does not count
is reported with the reason; where an outer one contradicts, so is that.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.errors import PdrunError, UsageError, did_you_mean
from pdrun.launcher.adapters import batch, cloud, kubernetes, mpi, slurm
from pdrun.launcher.adapters.model import LauncherInfo, IgnoredLauncher, Probes
from pdrun.launcher.adapters.parsing import Environ, LauncherAdapter

ADAPTERS: tuple[LauncherAdapter, ...] = (
    *(row.to_adapter() for row in (*mpi.WORKER_LAUNCHERS, *mpi.MPI_LAUNCHERS)),
    slurm.STEP_ADAPTER,
    kubernetes.PET_ADAPTER,
    *kubernetes.POD_ADAPTERS,
    *cloud.CLOUD_ADAPTERS,
    mpi.HAND_SET_VARIABLES.to_adapter(),
    kubernetes.ASCEND_ADAPTER,
    slurm.JOB_ADAPTER,
    *batch.ALLOCATION_ADAPTERS,
)
"""Innermost first."""
LAUNCHER_FAMILIES = {
    "slurm": ("slurm-step", "slurm-job"),
    "kubernetes": ("jobset", "indexed-job", "pytorch-operator"),
}
"""Names for several rows."""
LAUNCHER_NAMES = (*(launcher.name for launcher in ADAPTERS), *LAUNCHER_FAMILIES)


def detect_launcher(environ: Environ, probes: Probes, launcher: str = "") -> LauncherInfo:
    """
    Return what the innermost launcher says.

    Args:
        launcher: one of NAMES: only this one is read, fresh or stale; ``none``: nobody is; empty:
            as the module says.

    Raises:
        ConfigError: the launcher that counts contradicts itself, is half there or malformed; names
            the variable.
        UsageError: there is no launcher of that name, or it says nothing here.
    """
    present = [row for row in ADAPTERS if row.is_present(environ)]
    if launcher == "none":
        return LauncherInfo(ignored=tuple(_make_ignored(row, environ, "--launcher none") for row in present))
    if launcher:
        return _read_named(environ, probes, launcher, present)
    found: LauncherInfo | None = None
    ignored: list[IgnoredLauncher] = []
    notes: list[str] = []
    for row in present:
        if stale := row.why_stale(environ, probes):
            ignored.append(_make_ignored(row, environ, f"stale: {stale}"))
            notes.append(
                f"the variables of {row.title} are left over from another process: {stale}"
            )
        elif found is None:
            found = row.read(environ, probes)
        else:
            found, more = _merge_outer(found, row, environ, probes)
            ignored.append(_make_ignored(row, environ, f"outer: {found.title} is nearer"))
            notes += more
    found = found or LauncherInfo()
    return replace(found, ignored=tuple(ignored), notes=(*found.notes, *notes))


def _read_named(environ: Environ, probes: Probes, launcher: str, present: list[LauncherAdapter]) -> LauncherInfo:
    if launcher not in LAUNCHER_NAMES:
        raise UsageError(
            f"{launcher!r} is no launcher",
            where="--launcher",
            hint=did_you_mean(launcher, LAUNCHER_NAMES) or f"there are {', '.join(LAUNCHER_NAMES)} and none",
        )
    wanted = LAUNCHER_FAMILIES.get(launcher, (launcher,))
    rows = [row for row in present if row.name in wanted]
    if not rows:
        raise UsageError(
            f"{launcher} says nothing in this environment", where="--launcher", hint="see pdrun env"
        )
    others = tuple(
        _make_ignored(row, environ, f"--launcher {launcher}") for row in present if row is not rows[0]
    )
    return replace(rows[0].read(environ, probes), ignored=others)


def _make_ignored(row: LauncherAdapter, environ: Environ, why: str) -> IgnoredLauncher:
    return IgnoredLauncher(row.name, why, row.variables(environ))


_ALLOCATION_FIELDS = ("hosts", "job_id", "attempt", "time_limit", "ends_at")
"""What an inner launcher takes over from an outer allocation where it does not say it itself."""


def _merge_outer(
    found: LauncherInfo, row: LauncherAdapter, environ: Environ, probes: Probes
) -> tuple[LauncherInfo, list[str]]:
    """
    Return what counts with what only the outer launcher knows, and where the two differ.

    An outer launcher that cannot be read is no error: it does not count.
    """
    try:
        outer = row.read(environ, probes)
    except PdrunError as error:
        return found, [f"{row.title}, which is further out, is not read: {error}"]
    notes = []
    pairs = ((outer.rank, found.rank), (outer.world, found.world))
    differs = any(one is not None and other is not None and one != other for one, other in pairs)
    if outer.kind == "task" and found.kind == "task" and differs:
        notes.append(
            f"{found.title} says {_format_rank(found)}, {outer.title} says {_format_rank(outer)}: the nearer one counts"
            " (--launcher chooses)"
        )
    if outer.kind == "allocation" and found.launcher not in ("pdrun", "torchrun"):
        missing = [name for name in _ALLOCATION_FIELDS if not getattr(found, name) and getattr(outer, name)]
        values = {name: getattr(outer, name) for name in missing}
        sources = {**found.sources, **{name: outer.sources.get(name, "") for name in missing}}
        found = replace(found, **values, sources=sources)
    return found, notes


def _format_rank(found: LauncherInfo) -> str:
    return f"{'?' if found.rank is None else found.rank} of {'?' if found.world is None else found.world}"
