"""
How many workers a node gets, with which device and which CPUs: pure functions over the facts.

Never fewer than asked for, and never more devices than are visible: what does not fit is refused
with both numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdrun.backends import affinity
from pdrun.backends.affinity import CpuBinding
from pdrun.backends.base import Backend
from pdrun.backends.detect import choose_backend
from pdrun.backends.visibility import DeviceGrant, grant_devices
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.config.spec import JobSpec, Resources, Sources, source_of
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.model import Facts
from pdrun.topology import CpuSet, Device

CPU_BACKEND = "cpu"


@dataclass(frozen=True)
class Placement:
    """What one node does."""

    backend: Backend
    reason: str
    workers: int
    devices: tuple[Device, ...]
    """One a worker, in local rank order; empty for the CPU."""
    grants: tuple[DeviceGrant, ...]
    binding: CpuBinding
    notes: tuple[str, ...] = ()


def place_workers(spec: JobSpec, facts: Facts, sources: Sources) -> Placement:
    """
    Decide a node's workers. A simulated node takes its share of the machine's devices and CPUs.

    Raises:
        UsageError: more devices asked for than there are, or a share that does not come out even.
        ConfigError: the device kind that was asked for cannot be used here.
    """
    backend, reason = _choose_backend(spec, facts, sources)
    visible = next(found.devices for found in facts.backends if found.name == backend.name)
    indices = spec.resources.indices
    if indices is not None and backend.name != CPU_BACKEND and spec.place.rank_table:
        visible = _select_physical_devices(
            visible, indices, sources.get("place.rank_table", "--rank-table")
        )
    elif indices is not None and backend.name != CPU_BACKEND:
        visible = _select_devices(visible, indices, sources.get("place.hosts", "--hosts"))
    index, count = spec.place.simulated or (0, 1)
    workers = _count_workers(spec, facts, sources, backend, len(visible), count)
    devices = (
        visible[index * workers : (index + 1) * workers] if backend.name != CPU_BACKEND else ()
    )
    cpus = affinity.share_cpus(facts.cpus, index, count) if count > 1 else facts.cpus
    binding = affinity.split_cpus(cpus, workers, _binding_mode(spec, facts.cpus, count))
    _check_binding(
        spec, sources, binding, len(facts.cpus.cores) or len(facts.cpus.cpus), workers * count
    )
    given = (
        grant_devices(backend, devices, facts.environ) if devices else _cpu_grants(indices, workers)
    )
    notes = []
    if len(visible) > workers * count and backend.name != CPU_BACKEND:
        notes.append(
            f"{len(visible) - workers * count} of {len(visible)} visible devices are not used"
        )
    return Placement(backend, reason, workers, tuple(devices), given, binding, tuple(notes))


def resources_on_host(
    resources: Resources, host: Host, source: str, *, exact: bool = False
) -> Resources:
    """
    Return the resources of one listed host: its own number of workers, unless ``--devices`` takes
    fewer.

    Args:
        exact: fewer are refused, too (a rank table counts every rank).

    Raises:
        UsageError: ``--devices`` takes more than the host has.
    """
    wanted = resources.devices
    if host.devices is None:
        return resources
    if isinstance(wanted, int) and (wanted > host.devices or (exact and wanted != host.devices)):
        raise UsageError(
            f"{wanted} worker(s) on {host.name}, which has {host.devices} ({host.where})",
            where=source,
            hint="leave it out, or change the list of hosts",
        )
    count = wanted if isinstance(wanted, int) else host.devices
    return replace(
        resources, devices=count, indices=host.indices[:count] if host.indices is not None else None
    )


def _select_devices(
    visible: tuple[Device, ...], indices: tuple[int, ...], source: str
) -> tuple[Device, ...]:
    """Return the visible devices at the indices that a list of hosts names."""
    if missing := [index for index in indices if index >= len(visible)]:
        raise UsageError(
            f"device {missing[0]} is not among the {len(visible)} visible here",
            where=source,
            hint="indices count visible devices, from 0",
        )
    return tuple(visible[index] for index in indices)


def _cpu_grants(indices: tuple[int, ...] | None, workers: int) -> tuple[DeviceGrant, ...]:
    """
    CPU workers all have device 0, unless a list numbers them: a rank table that is tried out
    without its devices.
    """
    numbers = indices if indices is not None and len(indices) == workers else (0,) * workers
    return tuple(DeviceGrant({}, number) for number in numbers)


def _select_physical_devices(
    visible: tuple[Device, ...], ids: tuple[int, ...], source: str
) -> tuple[Device, ...]:
    """
    Return the visible devices that a rank table names by the numbers that the driver gives them.
    """
    by_name = {device.name: device for device in visible}
    if missing := [number for number in ids if str(number) not in by_name]:
        raise ConfigError(
            f"device {missing[0]} of the rank table is not visible here",
            where=source,
            hint=f"visible are {', '.join(by_name) or 'none'}",
        )
    if list(ids) != sorted(ids):
        raise ConfigError(
            "ranks do not rise with the devices of this server",
            where=source,
            hint="the driver wants it so",
        )
    return tuple(by_name[str(number)] for number in ids)


def _choose_backend(spec: JobSpec, facts: Facts, sources: Sources) -> tuple[Backend, str]:
    try:
        return choose_backend(spec.resources.backend, facts.backends)
    except PdrunError as error:
        source = sources.get("resources.backend", "--backend")
        if error.where == "--backend" and source != "default":
            error.where = source
        raise error from None


def _count_workers(
    spec: JobSpec, facts: Facts, sources: Sources, backend: Backend, visible: int, nodes: int
) -> int:
    """Return the workers of one node, of which ``nodes`` share this machine."""
    wanted = spec.resources.devices
    source = source_of(sources, "resources.devices", "--devices")
    if isinstance(wanted, int):
        if backend.name != CPU_BACKEND and wanted * nodes > visible:
            each = f"{nodes} simulated nodes of {wanted}" if nodes > 1 else str(wanted)
            raise UsageError(
                f"{each} device(s) are more than the {visible} {backend.name} device(s) visible here",
                where=source,
                hint=f"ask for at most {visible // nodes}"
                if visible >= nodes
                else "or use --backend cpu",
            )
        return wanted
    if wanted == "accelerators" and backend.name == CPU_BACKEND:
        reasons = "; ".join(
            f"{found.name}: {found.reason}" for found in facts.backends if found.name != CPU_BACKEND
        )
        raise ConfigError(
            "no accelerator is visible here",
            where=source,
            hint=reasons or "leave out --backend cpu",
        )
    if backend.name == CPU_BACKEND:
        if wanted.endswith("cpus"):
            return _divide_evenly(facts.cpus.usable_cpus, nodes, "usable CPU", source)
        return 1
    return _divide_evenly(visible, nodes, f"visible {backend.name} device", source)


def _divide_evenly(total: int, nodes: int, what: str, source: str) -> int:
    if nodes > 1 and total % nodes:
        raise UsageError(
            f"{total} {what}(s) do not divide over {nodes} simulated nodes",
            where=source,
            hint="say how many a node gets with --devices",
        )
    return max(1, total // nodes)


def _binding_mode(spec: JobSpec, cpus: CpuSet, nodes: int) -> affinity.BindMode:
    """Return how to bind; simulated nodes that share too few cores leave their workers unbound."""
    cores = len(cpus.cores) or len(cpus.cpus)
    if nodes > 1 and cores < nodes:
        return "none"
    return spec.resources.bind


def _check_binding(
    spec: JobSpec, sources: Sources, binding: CpuBinding, cores: int, workers: int
) -> None:
    """
    Refuse a binding that was asked for by name and cannot be had; only ``auto`` goes on without
    one.
    """
    if spec.resources.bind not in ("cores", "numa") or binding.is_bound:
        return
    source = sources.get("resources.bind", "--bind")
    raise ConfigError(
        f"{spec.resources.bind} cannot be had: {cores} core(s) may be used here, for {workers} worker(s)",
        where=source,
        hint="start fewer workers, or use --bind auto",
    )


def choose_threads(
    spec: JobSpec, environ: Mapping[str, str], binding: CpuBinding
) -> tuple[tuple[int, ...], str]:
    """
    Return OMP_NUM_THREADS of each worker and where it comes from: the user's own setting wins over
    `auto`.
    """
    said = environ.get("OMP_NUM_THREADS", "")
    first = said.partition(",")[0].strip()
    if isinstance(spec.resources.threads, int):
        note = f"OMP_NUM_THREADS={said} is overridden by --threads {spec.resources.threads}"
        differs = bool(said) and said != str(spec.resources.threads)
        return (spec.resources.threads,) * len(binding.threads), note if differs else ""
    if first.isascii() and first.isdigit() and 0 < int(first) < 1_000_000:
        return (int(first),) * len(binding.threads), f"OMP_NUM_THREADS={said} is yours and is kept"
    return binding.threads, ""
