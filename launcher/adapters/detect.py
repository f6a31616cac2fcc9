"""
Which launcher started this process: one table, innermost first, over an environment that is passed
in.

Launchers nest, and what is inherited stays in the environment, so several rows may fit. The
innermost one counts that is not stale: a worker of pdrun or torchrun, then the MPIs, then a step of
Slurm, pods, managed services, and last the allocations, which give hosts only. What does not count
is reported with the reason; where an outer one contradicts, so is that.
"""

from __future__ import annotations

from dataclasses import replace

from pdrun.errors import PdrunError, UsageError, did_you_mean
from pdrun.launcher.adapters import batch, mpi, slurm
from pdrun.launcher.adapters import cloud as services
from pdrun.launcher.adapters import kubernetes as pods
from pdrun.launcher.adapters.model import Found, Ignored, Probes
from pdrun.launcher.adapters.parsing import Environ, Launcher

LAUNCHERS: tuple[Launcher, ...] = (
    *(row.launcher() for row in (*mpi.WORKERS, *mpi.MPI)),
    slurm.STEP,
    pods.PET,
    *pods.PODS,
    *services.SERVICES,
    mpi.BY_HAND.launcher(),
    pods.ASCEND,
    slurm.JOB,
    *batch.ALLOCATIONS,
)
"""Innermost first."""
FAMILIES = {
    "slurm": ("slurm-step", "slurm-job"),
    "kubernetes": ("jobset", "indexed-job", "pytorch-operator"),
}
"""Names for several rows."""
NAMES = (*(launcher.name for launcher in LAUNCHERS), *FAMILIES)


def detect(environ: Environ, probes: Probes, launcher: str = "") -> Found:
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
    present = [row for row in LAUNCHERS if row.marked(environ)]
    if launcher == "none":
        return Found(ignored=tuple(_ignored(row, environ, "--launcher none") for row in present))
    if launcher:
        return _asked(environ, probes, launcher, present)
    found: Found | None = None
    ignored: list[Ignored] = []
    notes: list[str] = []
    for row in present:
        if stale := row.stale(environ, probes):
            ignored.append(_ignored(row, environ, f"stale: {stale}"))
            notes.append(
                f"the variables of {row.title} are left over from another process: {stale}"
            )
        elif found is None:
            found = row.read(environ, probes)
        else:
            found, more = _outer(found, row, environ, probes)
            ignored.append(_ignored(row, environ, f"outer: {found.title} is nearer"))
            notes += more
    found = found or Found()
    return replace(found, ignored=tuple(ignored), notes=(*found.notes, *notes))


def _asked(environ: Environ, probes: Probes, launcher: str, present: list[Launcher]) -> Found:
    if launcher not in NAMES:
        raise UsageError(
            f"{launcher!r} is no launcher",
            where="--launcher",
            hint=did_you_mean(launcher, NAMES) or f"there are {', '.join(NAMES)} and none",
        )
    wanted = FAMILIES.get(launcher, (launcher,))
    rows = [row for row in present if row.name in wanted]
    if not rows:
        raise UsageError(
            f"{launcher} says nothing in this environment", where="--launcher", hint="see pdrun env"
        )
    others = tuple(
        _ignored(row, environ, f"--launcher {launcher}") for row in present if row is not rows[0]
    )
    return replace(rows[0].read(environ, probes), ignored=others)


def _ignored(row: Launcher, environ: Environ, why: str) -> Ignored:
    return Ignored(row.name, why, row.variables(environ))


_KEPT = ("hosts", "job_id", "attempt", "time_limit", "ends_at")
"""What an inner launcher takes over from an outer allocation where it does not say it itself."""


def _outer(
    found: Found, row: Launcher, environ: Environ, probes: Probes
) -> tuple[Found, list[str]]:
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
            f"{found.title} says {_place(found)}, {outer.title} says {_place(outer)}: the nearer one counts"
            " (--launcher chooses)"
        )
    if outer.kind == "allocation" and found.launcher not in ("pdrun", "torchrun"):
        missing = [name for name in _KEPT if not getattr(found, name) and getattr(outer, name)]
        values = {name: getattr(outer, name) for name in missing}
        sources = {**found.sources, **{name: outer.sources.get(name, "") for name in missing}}
        found = replace(found, **values, sources=sources)
    return found, notes


def _place(found: Found) -> str:
    return f"{'?' if found.rank is None else found.rank} of {'?' if found.world is None else found.world}"
