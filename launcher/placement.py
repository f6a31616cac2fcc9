"""
How many workers a node gets, with which device and which CPUs: pure functions over the facts.

Never fewer than asked for, and never more devices than are visible: what does not fit is refused with both numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdrun.backends import affinity
from pdrun.backends.affinity import Binding
from pdrun.backends.base import Backend
from pdrun.backends.detect import choose
from pdrun.backends.visibility import Grant, grants
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.model import Facts
from pdrun.launcher.spec import JobSpec, Sources
from pdrun.topology import CpuSet, Device

CPU = "cpu"


@dataclass(frozen=True)
class Placement:
    """What one node does."""

    backend: Backend
    reason: str
    workers: int
    devices: tuple[Device, ...]
    """One a worker, in local rank order; empty for the CPU."""
    grants: tuple[Grant, ...]
    binding: Binding
    notes: tuple[str, ...] = ()


def place(spec: JobSpec, facts: Facts, sources: Sources) -> Placement:
    """
    Decide a node's workers. A simulated node takes its share of the machine's devices and CPUs.

    Raises:
        UsageError: more devices asked for than there are, or a share that does not come out even.
        ConfigError: the device kind that was asked for cannot be used here.
    """
    backend, reason = _backend(spec, facts, sources)
    visible = next(found.devices for found in facts.backends if found.name == backend.name)
    index, count = spec.place.simulated or (0, 1)
    workers = _count(spec, facts, sources, backend, len(visible), count)
    devices = visible[index * workers : (index + 1) * workers] if backend.name != CPU else ()
    cpus = affinity.share(facts.cpus, index, count) if count > 1 else facts.cpus
    binding = affinity.split(cpus, workers, _mode(spec, facts.cpus, count))
    _check_bound(spec, sources, binding, len(facts.cpus.cores) or len(facts.cpus.cpus), workers * count)
    given = grants(backend, devices, facts.environ) if devices else (Grant({}, 0),) * workers
    notes = []
    if len(visible) > workers * count and backend.name != CPU:
        notes.append(f"{len(visible) - workers * count} of {len(visible)} visible devices are not used")
    return Placement(backend, reason, workers, tuple(devices), given, binding, tuple(notes))


def _backend(spec: JobSpec, facts: Facts, sources: Sources) -> tuple[Backend, str]:
    try:
        return choose(spec.resources.backend, facts.backends)
    except PdrunError as error:
        source = sources.get("resources.backend", "--backend")
        if error.where == "--backend" and source != "default":
            error.where = source
        raise error from None


def _count(spec: JobSpec, facts: Facts, sources: Sources, backend: Backend, visible: int, nodes: int) -> int:
    """Return the workers of one node, of which ``nodes`` share this machine."""
    wanted = spec.resources.devices
    source = _said(sources)
    if isinstance(wanted, int):
        if backend.name != CPU and wanted * nodes > visible:
            each = f"{nodes} simulated nodes of {wanted}" if nodes > 1 else str(wanted)
            raise UsageError(
                f"{each} device(s) are more than the {visible} {backend.name} device(s) visible here", where=source,
                hint=f"ask for at most {visible // nodes}" if visible >= nodes else "or use --backend cpu",
            )  # fmt: skip
        return wanted
    if wanted == "accelerators" and backend.name == CPU:
        reasons = "; ".join(f"{found.name}: {found.reason}" for found in facts.backends if found.name != CPU)
        raise ConfigError("no accelerator is visible here", where=source, hint=reasons or "leave out --backend cpu")
    if backend.name == CPU:
        return _share(facts.cpus.usable, nodes, "usable CPU", source) if wanted.endswith("cpus") else 1
    return _share(visible, nodes, f"visible {backend.name} device", source)


def _share(total: int, nodes: int, what: str, source: str) -> int:
    if nodes > 1 and total % nodes:
        raise UsageError(
            f"{total} {what}(s) do not divide over {nodes} simulated nodes", where=source,
            hint="say how many a node gets with --devices",
        )  # fmt: skip
    return max(1, total // nodes)


def _said(sources: Sources) -> str:
    source = sources.get("resources.devices", "default")
    return "--devices" if source == "default" else source


def _mode(spec: JobSpec, cpus: CpuSet, nodes: int) -> affinity.Mode:
    """Return how to bind; simulated nodes that share too few cores leave their workers unbound."""
    cores = len(cpus.cores) or len(cpus.cpus)
    if nodes > 1 and cores < nodes:
        return "none"
    return spec.resources.bind


def _check_bound(spec: JobSpec, sources: Sources, binding: Binding, cores: int, workers: int) -> None:
    """Refuse a binding that was asked for by name and cannot be had; only ``auto`` goes on without one."""
    if spec.resources.bind not in ("cores", "numa") or binding.bound:
        return
    source = sources.get("resources.bind", "--bind")
    raise ConfigError(
        f"{spec.resources.bind} cannot be had: {cores} core(s) may be used here, for {workers} worker(s)",
        where=source, hint="start fewer workers, or use --bind auto",
    )  # fmt: skip


def threads(spec: JobSpec, environ: Mapping[str, str], binding: Binding) -> tuple[tuple[int, ...], str]:
    """Return OMP_NUM_THREADS of each worker and where it comes from: the user's own setting wins over `auto`."""
    said = environ.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()
    if isinstance(spec.resources.threads, int):
        note = f"OMP_NUM_THREADS={said} is overridden by --threads {spec.resources.threads}"
        differs = bool(said) and said != str(spec.resources.threads)
        return (spec.resources.threads,) * len(binding.threads), note if differs else ""
    if first.isascii() and first.isdigit() and 0 < int(first) < 1_000_000:
        return (int(first),) * len(binding.threads), f"OMP_NUM_THREADS={said} is yours and is kept"
    return binding.threads, ""
