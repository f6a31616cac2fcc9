"""
Number of workers of a node, their devices and CPUs. Pure.

A node never gets fewer workers than requested, nor more devices than are visible. If the request
does not fit, the message has both numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pdrun.backends import affinity
from pdrun.backends.affinity import CpuBinding
from pdrun.backends.base import Backend
from pdrun.backends.detect import choose_backend
from pdrun.backends.visibility import DeviceGrant, expose_devices, grant_devices
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.common.rank_lists import format_ranks, parse_cpu_lists
from pdrun.launcher.common.server_places import most_servers_of_node
from pdrun.launcher.config.spec import JobSpec, Resources, Sources, source_of
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.model import Facts
from pdrun.quick_dataclass import dataclass
from pdrun.text import plural
from pdrun.topology import CpuSet, Device

CPU_BACKEND = "cpu"


@dataclass(frozen=True)
class WorkerPlacement:
    """Workers of one node, with their devices and CPUs."""

    backend: Backend
    reason: str
    workers: int
    devices: tuple[Device, ...]
    """One device per worker, in local rank order; empty for the CPU backend."""
    grants: tuple[DeviceGrant, ...]
    binding: CpuBinding
    notes: tuple[str, ...] = ()
    server_cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs of each parameter server; empty: not bound."""
    devices_per_worker: int = 1


def assume_devices(spec: JobSpec, facts: Facts) -> tuple[Facts, tuple[str, ...]]:
    """
    Return facts in which this machine has the devices that a job names by kind and number, and a
    note if it has none.

    For plans that are only printed: ``--dry-run --backend npu --devices 8`` on a login node.
    """
    name, wanted = spec.resources.backend, spec.resources.devices
    found = next((one for one in facts.backends if one.name == name), None)
    if found is None or found.devices or not isinstance(wanted, int):
        return facts, ()
    count = wanted * (spec.resources.max_members if spec.place.local else 1)
    assumed = replace(
        found,
        present=True,
        broken=False,
        reason="assumed",
        devices=tuple(Device(name, index, str(index)) for index in range(count)),
    )
    backends = tuple(assumed if one is found else one for one in facts.backends)
    note = f"{plural(count, f'{name} device')} assumed: this host has none ({found.reason})"
    return replace(facts, backends=backends), (note,)


def place_workers(spec: JobSpec, facts: Facts, sources: Sources) -> WorkerPlacement:
    """
    Place a node's workers. A simulated node gets its share of the machine's devices and CPUs.

    Raises:
        UsageError: more devices are requested than exist, or the shares are not equal.
        ConfigError: the requested backend cannot be used on this machine.
    """
    backend, reason = _choose_backend(spec, facts, sources)
    visible = next(found.devices for found in facts.backends if found.name == backend.name)
    has_devices = backend.name != CPU_BACKEND
    indices = spec.resources.indices
    if has_devices and indices is not None:
        if spec.place.rank_table:
            source = sources.get("place.rank_table", "--rank-table")
            visible = _select_physical_devices(visible, indices, source)
        else:
            source = sources.get("place.hosts", "--hosts")
            visible = _select_devices(visible, indices, source)
    index, nodes = spec.place.simulated or (0, 1)
    count = _count_workers(spec, facts, sources, backend, len(visible), nodes)
    workers = count
    if spec.program.is_per_node:
        workers = 1
    cpus = facts.cpus
    if nodes > 1:
        cpus = affinity.share_cpus(facts.cpus, index, nodes)
    if lists := parse_cpu_lists(spec.resources.bind):
        binding = _bind_listed_cpus(spec, sources, cpus, lists, workers)
        server_cpus: tuple[tuple[int, ...], ...] = ()
    else:
        mode = _binding_mode(spec, facts.cpus, nodes)
        binding, server_cpus = _bind_with_servers(spec, cpus, workers, mode)
    cores = len(facts.cpus.cores) or len(facts.cpus.cpus)
    _check_binding(spec, sources, binding, cores, workers * nodes)
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    if has_devices:
        devices = tuple(visible[index * count : (index + 1) * count])
        unused = len(visible) - count * nodes
        if unused > 0:
            notes = (f"{unused} of {len(visible)} visible devices are not used",)
    grants: tuple[DeviceGrant, ...]
    if devices and spec.program.is_per_node:
        grants = (DeviceGrant(expose_devices(backend, devices, facts.environ), 0),)
        devices = devices[:1]
    elif devices:
        grants = grant_devices(backend, devices, facts.environ)
    else:
        grants = _cpu_grants(indices, workers)
    return WorkerPlacement(
        backend,
        reason,
        workers,
        devices,
        grants,
        binding,
        notes,
        server_cpus,
        devices_per_worker=count // workers,
    )


def _bind_listed_cpus(
    spec: JobSpec,
    sources: Sources,
    cpus: CpuSet,
    lists: tuple[tuple[int, ...], ...],
    workers: int,
) -> CpuBinding:
    """Return the binding that the user has set for each local rank of a node."""
    source = source_of(sources, "resources.bind", "--bind")
    if spec.place.simulated is not None:
        raise UsageError(
            "simulated nodes share the CPUs of this machine",
            where=source,
            hint="use --bind auto with --local",
        )
    if len(lists) != workers:
        raise UsageError(
            f"{plural(len(lists), 'list')} of CPUs for {plural(workers, 'worker')} of this node",
            where=source,
            hint="separate the lists of the local ranks with /",
        )
    missing = sorted({cpu for own in lists for cpu in own} - set(cpus.cpus))
    if missing:
        raise ConfigError(
            f"CPU {missing[0]} is not one that this process may use ({format_ranks(cpus.cpus)})",
            where=source,
            hint="correct the lists, or use --bind cores",
        )
    return affinity.bind_listed(cpus, lists)


def _bind_with_servers(
    spec: JobSpec, cpus: CpuSet, workers: int, mode: str
) -> tuple[CpuBinding, tuple[tuple[int, ...], ...]]:
    """
    Distribute the CPUs to workers and servers.

    Servers get cores if there is one for each process of the node. Otherwise they are not bound,
    and the workers are bound as without servers.
    """
    servers = most_servers_of_node(spec.resources.servers, spec.resources.nodes)
    if servers:
        both = affinity.split_cpus(cpus, workers + servers, mode)
        if both.is_bound:
            mine = replace(both, sets=both.sets[:workers], threads=both.threads[:workers])
            return mine, both.sets[workers:]
    return affinity.split_cpus(cpus, workers, mode), ()


def resources_on_host(
    resources: Resources, host: Host, source: str, *, exact: bool = False
) -> Resources:
    """
    Return the resources of one listed host: its own number of workers, or fewer by ``--devices``.

    Args:
        exact: refuse fewer workers too, because a rank table counts every rank.

    Raises:
        UsageError: ``--devices`` exceeds the devices of the host.
    """
    wanted = resources.devices
    if host.devices is None:
        return resources
    if isinstance(wanted, int) and (wanted > host.devices or (exact and wanted != host.devices)):
        raise UsageError(
            f"{wanted} worker(s), but {host.name} has {host.devices} device(s) ({host.where})",
            where=source,
            hint="remove it, or change the list of hosts",
        )
    count = host.devices
    if isinstance(wanted, int):
        count = wanted
    indices = None
    if host.indices is not None:
        indices = host.indices[:count]
    return replace(resources, devices=count, indices=indices)


def _select_devices(
    visible: tuple[Device, ...], indices: tuple[int, ...], source: str
) -> tuple[Device, ...]:
    """Return the visible devices at the indices of a host list."""
    if missing := [index for index in indices if index >= len(visible)]:
        raise UsageError(
            f"device index must be below {len(visible)}, the number of visible devices,"
            f" got {missing[0]}",
            where=source,
            hint="indices count the visible devices, starting at 0",
        )
    return tuple(visible[index] for index in indices)


def _cpu_grants(indices: tuple[int, ...] | None, workers: int) -> tuple[DeviceGrant, ...]:
    """
    Return grants of CPU workers. The device index is 0, or that of a rank table that is tried
    without its devices.
    """
    numbers = (0,) * workers
    if indices is not None and len(indices) == workers:
        numbers = indices
    return tuple(DeviceGrant({}, number) for number in numbers)


def _select_physical_devices(
    visible: tuple[Device, ...], ids: tuple[int, ...], source: str
) -> tuple[Device, ...]:
    """
    Return the visible devices with the driver's numbers in a rank table.
    """
    by_name = {device.name: device for device in visible}
    if missing := [number for number in ids if str(number) not in by_name]:
        raise ConfigError(
            f"device {missing[0]} of the rank table is not visible",
            where=source,
            hint=f"visible devices: {', '.join(by_name) or 'none'}",
        )
    if list(ids) != sorted(ids):
        raise ConfigError(
            "the ranks of this server must be in the order of its devices",
            where=source,
            hint="the Ascend driver requires it",
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
    """Return the workers of one node. ``nodes`` simulated nodes share this machine."""
    wanted = spec.resources.devices
    source = source_of(sources, "resources.devices", "--devices")
    if isinstance(wanted, int):
        if backend.name != CPU_BACKEND and wanted * nodes > visible:
            requested = str(wanted)
            if nodes > 1:
                requested = f"{nodes} simulated nodes with {wanted}"
            hint = "use --backend cpu"
            if visible >= nodes:
                hint = f"use at most {visible // nodes}"
            raise UsageError(
                f"{requested} device(s), but {visible} {backend.name} device(s) are visible",
                where=source,
                hint=hint,
            )
        return wanted
    if wanted == "accelerators" and backend.name == CPU_BACKEND:
        reasons = "; ".join(
            f"{found.name}: {found.reason}" for found in facts.backends if found.name != CPU_BACKEND
        )
        raise ConfigError(
            "no accelerator is visible",
            where=source,
            hint=reasons or "remove --backend cpu",
        )
    if backend.name == CPU_BACKEND:
        if wanted.endswith("cpus"):
            return _divide_evenly(facts.cpus.usable_cpus, nodes, "usable CPU", source)
        return 1
    return _divide_evenly(visible, nodes, f"visible {backend.name} device", source)


def _divide_evenly(total: int, nodes: int, what: str, source: str) -> int:
    if nodes > 1 and total % nodes:
        raise UsageError(
            f"{total} {what}(s) cannot be divided among {nodes} simulated nodes",
            where=source,
            hint="set the number per node with --devices",
        )
    return max(1, total // nodes)


def _binding_mode(spec: JobSpec, cpus: CpuSet, nodes: int) -> str:
    """Return the binding mode: none if simulated nodes share fewer cores than nodes."""
    cores = len(cpus.cores) or len(cpus.cpus)
    if nodes > 1 and cores < nodes:
        return "none"
    return spec.resources.bind


def _check_binding(
    spec: JobSpec, sources: Sources, binding: CpuBinding, cores: int, workers: int
) -> None:
    """
    Refuse a binding that is requested but not possible. Only ``auto`` allows unbound workers.
    """
    if spec.resources.bind not in ("cores", "numa") or binding.is_bound:
        return
    source = sources.get("resources.bind", "--bind")
    raise ConfigError(
        f"{spec.resources.bind} is not possible: {cores} usable core(s) for {workers} worker(s)",
        where=source,
        hint="start fewer workers, or use --bind auto",
    )


def choose_threads(
    spec: JobSpec, environ: Mapping[str, str], binding: CpuBinding
) -> tuple[tuple[int, ...], str]:
    """
    Return OMP_NUM_THREADS of each worker, and a note on its source.

    ``--threads N`` overrides the environment variable. The variable overrides ``--threads auto``.
    """
    workers = len(binding.threads)
    variable = environ.get("OMP_NUM_THREADS", "")
    first = variable.partition(",")[0].strip()
    threads = spec.resources.threads
    if isinstance(threads, int):
        note = ""
        if variable and variable != str(threads):
            note = f"OMP_NUM_THREADS={variable} is overridden by --threads {threads}"
        return (threads,) * workers, note
    if first.isascii() and first.isdigit() and 0 < int(first) < 1_000_000:
        return (int(first),) * workers, f"OMP_NUM_THREADS={variable} of the environment is used"
    return binding.threads, ""
