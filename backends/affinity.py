"""
CPUs and threads of the workers of a node: read once, then decided by a pure function.

`read_cpus` reads the affinity mask, the cgroup bandwidth limits of this process and the topology in
/sys. `split_cpus` distributes cores to workers; hyper-thread siblings stay together. Two workers
never share a CPU: either all sets are disjoint and not empty, or no worker is bound and the note
gives the reason.

Limits: the distance between a core and an accelerator is not considered. Exclusive cpusets of other
jobs are visible only in the mask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from pdrun.errors import PdrunError, UsageError
from pdrun.quick_dataclass import dataclass
from pdrun.text import plural
from pdrun.topology import CpuSet

T = TypeVar("T")
CpuGroup = tuple[int, ...]
"""CPU numbers of a core (its hyper-threads), or of a NUMA node."""


@dataclass(frozen=True)
class CpuBinding:
    """The result of `split_cpus`; index i is the worker of local rank i."""

    sets: tuple[tuple[int, ...], ...]
    """CPUs of each worker, ascending. Empty: not bound. All workers are bound, or none."""
    threads: tuple[int, ...]
    """Threads that each worker should run, at least 1."""
    note: str
    """What was decided and why, in one line."""

    @property
    def is_bound(self) -> bool:
        """Return whether workers are bound."""
        return any(self.sets)


def split_cpus(cpus: CpuSet, workers: int, mode: str = "auto") -> CpuBinding:
    """
    Distribute the CPUs of a node to its workers.

    * auto: cores, if there is at least one per worker, else unbound. A single worker stays unbound,
      because it has the full mask.
    * cores: the same, but a single worker is bound, too.
    * numa: as cores, but a worker gets CPUs of several NUMA nodes only if it gets all of theirs.
    * none: unbound.

    The threads of a worker are its CPUs, or its share of what the mask and the bandwidth limit
    allow, if that is less. The first workers get the remainder (3 CPUs, 2 workers: 2 + 1).

    Raises:
        UsageError: fewer than one worker, or an unknown mode.
    """
    if workers < 1:
        raise UsageError(
            f"the number of workers must be at least 1, got {workers}", where="--devices"
        )
    if mode not in ("auto", "cores", "numa", "none"):
        raise UsageError(f"{mode!r} is not one of auto, cores, numa, none", where="--bind")
    cores = _list_cores(cpus)
    if mode == "none":
        return _leave_unbound(cpus, workers, "not bound: --bind none")
    if not cores:
        return _leave_unbound(cpus, workers, "not bound: the affinity mask is empty or unknown")
    if mode == "auto" and workers == 1:
        return _leave_unbound(cpus, workers, "not bound: one worker has the full mask")
    if len(cores) < workers:
        return _leave_unbound(
            cpus, workers, f"not bound: {plural(len(cores), 'core')} for {workers} workers"
        )
    if mode == "numa":
        nodes = _list_memory_nodes(cpus, cores)
        if not nodes:
            return _bind_workers(
                cpus,
                _split_evenly(cores, workers),
                "cores in order, because NUMA nodes are unknown",
            )
        return _bind_workers(
            cpus, _deal_nodes(nodes, workers), f"cores of {plural(len(nodes), 'NUMA node')}"
        )
    return _bind_workers(
        cpus,
        _split_evenly(cores, workers),
        f"{plural(len(cores), 'core')} for {plural(workers, 'worker')}",
    )


def bind_listed(cpus: CpuSet, lists: Sequence[Sequence[int]]) -> CpuBinding:
    """Bind each worker to the CPUs that the user has listed for it."""
    parts = [[(cpu,) for cpu in own] for own in lists]
    return _bind_workers(cpus, parts, "the lists of --bind")


def share_cpus(cpus: CpuSet, index: int, count: int) -> CpuSet:
    """
    Return the CPUs of simulated node ``index`` of ``count``.

    Cores, if there is at least one per node. Otherwise all nodes keep the full mask, with a quota
    of their share. Then no worker should be bound: pass mode ``none`` to `split_cpus`.
    """
    if not 0 <= index < count:
        raise UsageError(
            f"the index of a simulated node must be below {count}, got {index}", where="--local"
        )
    quota = None if cpus.quota is None else cpus.quota / count
    cores = _list_cores(cpus)
    if len(cores) < count:
        return CpuSet(
            cpus.cpus, cpus.usable_cpus / count if quota is None else quota, cpus.cores, cpus.numa
        )
    mine = {cpu for core in _split_evenly(cores, count)[index] for cpu in core}
    return CpuSet(
        tuple(sorted(mine)),
        quota,
        _restrict_groups(cpus.cores, mine),
        _restrict_groups(cpus.numa, mine),
    )


def _restrict_groups(groups: Iterable[CpuGroup], wanted: set[int]) -> tuple[CpuGroup, ...]:
    """Restrict groups to the wanted CPUs and remove empty groups."""
    kept = (tuple(sorted(set(group) & wanted)) for group in groups)
    return tuple(group for group in kept if group)


def _is_partition(groups: Sequence[CpuGroup], cpus: set[int]) -> bool:
    """Return whether each CPU is in exactly one group; an inconsistent /sys is not used."""
    flat = [cpu for group in groups for cpu in group]
    return len(flat) == len(set(flat)) and set(flat) == cpus


def _list_cores(cpus: CpuSet) -> tuple[CpuGroup, ...]:
    """Return the cores of the mask, sorted by NUMA node; if unknown, each CPU is a core."""
    mask = set(cpus.cpus)
    cores = _restrict_groups(cpus.cores, mask)
    if not _is_partition(cores, mask):
        cores = tuple((cpu,) for cpu in sorted(mask))
    place = {cpu: number for number, node in enumerate(cpus.numa) for cpu in node}
    return tuple(sorted(cores, key=lambda core: (place.get(core[0], -1), core)))


def _list_memory_nodes(cpus: CpuSet, cores: Sequence[CpuGroup]) -> tuple[tuple[CpuGroup, ...], ...]:
    """Return the cores of each NUMA node; empty if unknown, or if a core is in two nodes."""
    numa = _restrict_groups(cpus.numa, set(cpus.cpus))
    if not _is_partition(numa, set(cpus.cpus)):
        return ()
    nodes = tuple(tuple(core for core in cores if set(core) <= set(node)) for node in numa)
    return nodes if sum(map(len, nodes)) == len(cores) else ()


def _split_evenly(row: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a sequence into ``parts`` runs whose lengths differ by at most 1, longer ones first."""
    least, extra = divmod(len(row), parts)
    starts = [part * least + min(part, extra) for part in range(parts + 1)]
    return [row[low:high] for low, high in pairwise(starts)]


def _deal_nodes(nodes: Sequence[Sequence[CpuGroup]], workers: int) -> list[Sequence[CpuGroup]]:
    """Distribute NUMA nodes if there are more than workers, else the cores of each node."""
    if workers < len(nodes):
        return [[core for node in run for core in node] for run in _split_evenly(nodes, workers)]
    counts = [0] * len(nodes)
    for _ in range(workers):  # the next worker gets the node with most cores per worker
        best = max(
            range(len(nodes)),
            key=lambda number: (len(nodes[number]) / (counts[number] + 1), -number),
        )
        counts[best] += 1
    return [
        part
        for node, count in zip(nodes, counts, strict=True)
        if count
        for part in _split_evenly(node, count)
    ]


def _bind_workers(cpus: CpuSet, parts: Sequence[Sequence[CpuGroup]], note: str) -> CpuBinding:
    sets = tuple(tuple(sorted(cpu for core in part for cpu in core)) for part in parts)
    check_disjoint(sets)
    shares = _share_threads(cpus.usable_cpus, len(sets))
    if cpus.quota is None or cpus.quota >= len(cpus.cpus):
        return CpuBinding(sets, tuple(map(len, sets)), f"bound: {note}")
    threads = tuple(min(len(own), least) for own, least in zip(sets, shares, strict=True))
    return CpuBinding(
        sets, threads, f"bound: {note}; threads limited by a quota of {cpus.quota:g} CPUs"
    )


def _leave_unbound(cpus: CpuSet, workers: int, note: str) -> CpuBinding:
    return CpuBinding(((),) * workers, _share_threads(cpus.usable_cpus, workers), note)


def _share_threads(total: int, parts: int) -> tuple[int, ...]:
    """Divide ``total`` threads among workers, at least 1 each; the first get the remainder."""
    least, extra = divmod(total, parts)
    return tuple(max(1, least + (part < extra)) for part in range(parts))


def check_disjoint(sets: Sequence[Sequence[int]]) -> None:
    """
    Check that no CPU is used twice and that every worker has one.

    Raises:
        PdrunError: a bug of pdrun; names the workers. Nothing is started.
    """
    owner: dict[int, int] = {}
    for worker, own in enumerate(sets):
        if not own:
            raise PdrunError(f"local rank {worker} would be bound to no CPU")
        for cpu in own:
            if cpu in owner:
                raise PdrunError(
                    f"CPU {cpu} would be given to local ranks {owner[cpu]} and {worker}"
                )
            owner[cpu] = worker


# --- reading the machine -----------------------------------------------------


def read_cpus(root: Path = Path("/"), *, mask: Iterable[int] | None = None) -> CpuSet:
    """
    Read the CPUs that this process may use; never fails, what is unknown is empty.

    ``mask`` replaces the affinity mask in tests.

    Files (real samples)::

        /proc/self/cgroup                                       0::/user.slice/job.scope
        /sys/fs/cgroup/.../cpu.max                              150000 100000
        /sys/fs/cgroup/cpu,cpuacct/.../cpu.cfs_quota_us         -1
        /sys/devices/system/cpu/cpu0/topology/core_cpus_list    0,64
        /sys/devices/system/node/node0/cpulist                  0-31,64-95

    Older kernels have thread_siblings_list instead of core_cpus_list.
    """
    own = set(_read_mask() if mask is None else mask)
    system = root / "sys/devices/system"
    numa = [
        parse_cpu_list(_read_text(path / "cpulist"))
        for path in _list_numbered(system / "node", "node")
    ]
    return CpuSet(
        tuple(sorted(own)),
        _read_quota(root),
        _read_cores(system / "cpu", own),
        _restrict_groups(numa, own),
    )


def _read_mask() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _list_numbered(folder: Path, stem: str) -> list[Path]:
    """Return the entries ``stem0``, ``stem1``, ... of a folder in numeric order."""
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    names = [name for name in entries if re.fullmatch(stem + "[0-9]+", name)]
    return [folder / name for name in sorted(names, key=lambda name: int(name[len(stem) :]))]


def parse_cpu_list(text: str) -> CpuGroup:
    """Parse the kernel's ``0-3,8,10-11``; return an empty tuple for other text."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            return ()
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cpus))


def _read_cores(folder: Path, own: set[int]) -> tuple[CpuGroup, ...]:
    """Group the CPUs by core; empty if /sys does not contain the core of each CPU."""
    cores: list[CpuGroup] = []
    seen: set[int] = set()
    for cpu in sorted(own):
        if cpu in seen:
            continue
        place = folder / f"cpu{cpu}/topology"
        siblings = (
            set(
                parse_cpu_list(
                    _read_text(place / "core_cpus_list")
                    or _read_text(place / "thread_siblings_list")
                )
            )
            & own
        )
        if cpu not in siblings or siblings & seen:
            return ()
        seen |= siblings
        cores.append(tuple(sorted(siblings)))
    return tuple(cores)


def _read_quota(root: Path) -> float | None:
    """Return the smallest bandwidth limit, in CPUs, of this process's cgroup and its ancestors."""
    limits = [
        limit for folder in _list_cgroups(root) if (limit := _read_cgroup_quota(folder)) is not None
    ]
    return min(limits, default=None)


def _read_cgroup_quota(folder: Path) -> float | None:
    """Return the limit of a cgroup: ``cpu.max`` (v2), or cfs_quota_us / cfs_period_us (v1)."""
    words = _read_text(folder / "cpu.max").split()
    if not words:
        words = [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
    if (
        len(words) == 2
        and all(re.fullmatch("[0-9]+", word) for word in words)
        and int(words[1]) > 0
    ):
        return int(words[0]) / int(words[1]) or None
    return None  # "max", "-1", or no file


def _list_cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's cgroups with a cpu controller, leaf first."""
    paths = {}
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    folders: list[Path] = []
    for kind, inner, mount in _list_cgroup_mounts(root):
        base = root / mount.lstrip("/")
        # Without a cgroup namespace a container sees the host's path, but the mount shows only what
        # is below `inner`.
        path = paths.get(kind, "/")
        rest = path[len(inner) :] if inner != "/" and (path + "/").startswith(inner + "/") else path
        leaf = base / rest.strip("/")
        if ".." in leaf.parts or not leaf.is_dir():
            leaf = base
        folders += [
            leaf,
            *(parent for parent in leaf.parents if parent == base or base in parent.parents),
        ]
    return folders


def _list_cgroup_mounts(root: Path) -> list[tuple[str, str, str]]:
    """Return (file system, root inside it, mount point) of cgroup mounts with a cpu controller."""
    mounts = []
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        # 30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "cpu" in kind[2].split(",")):
            mounts.append((kind[0], fields[3], fields[4]))
    return mounts
