"""
Devices, CPUs and network interfaces of a node.

Devices and CPUs are frozen values for placement and affinity.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from pdrun.quick_dataclass import dataclass

INTERFACES_VARIABLE = "PDRUN_INTERFACES"
"""
Variable in which `pdrun.init` lists the variables that it has set (``GLOO_SOCKET_IFNAME=lo``). A
job that the process starts has other interfaces, and takes them for the user's otherwise.
"""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU slot, of this node."""

    kind: str
    """Name of its backend table: cpu, cuda, rocm, npu, xpu or mps."""
    index: int
    """Position among the devices visible to the launcher."""
    name: str = ""
    """
    Its name in the visibility variable: ``"4"``, ``"GPU-7a..."``, ``"MIG-..."``; empty for cpu.
    """


@dataclass(frozen=True)
class CpuSet:
    """The CPUs that this process may use."""

    cpus: tuple[int, ...]
    """Logical CPU numbers of the affinity mask, ascending."""
    quota: float | None = None
    """CPUs that the cgroup's bandwidth limit allows (cpu.max, cfs_quota_us); None: no limit."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The same CPUs grouped by physical core (hyper-thread siblings together); empty: unknown."""
    numa: tuple[tuple[int, ...], ...] = ()
    """The same CPUs grouped by NUMA node; empty: unknown."""

    @property
    def usable_cpus(self) -> int:
        """Return how many threads can run at the same time: the mask or the quota, at least 1."""
        count = max(1, len(self.cpus))
        if self.quota is None:
            return count
        return max(1, min(count, int(self.quota)))


def choose_interface_variables(
    address: str,
    addresses: Iterable[tuple[str, str]],
    physical: Collection[str],
    environ: Mapping[str, str],
    backend: str = "",
) -> dict[str, str]:
    """
    Return the variables that make collectives use the interface with this node's own address.

    By default gloo and TensorPipe use the address of the host's own name. It may not resolve, and
    Debian maps it to 127.0.1.1, which other hosts cannot reach. NCCL may select a virtual bridge.
    Pure.

    Args:
        address: the address by which the other nodes reach this one.
        addresses: (interface, address) of every interface that is up.
        physical: interfaces of hardware. If there are others than the chosen one, NCCL keeps its
            own choice: it may use several, or prefer InfiniBand.
        environ: variables of the user, which are never replaced.
        backend: kind of the devices.
    """
    pairs = list(addresses)
    wanted = address.partition("%")[0]
    # getifaddrs shows the label of an additional address: eth0:1
    labels = [name for name, own in pairs if own.partition("%")[0] == wanted]
    if not labels:
        return {}
    label = labels[0]
    name = label.partition(":")[0]
    found = {"GLOO_SOCKET_IFNAME": label, "TP_SOCKET_IFNAME": label}
    others = {other.partition(":")[0] for other, _ in pairs} - {name}
    is_loopback = wanted.startswith("127.") or wanted == "::1"
    has_choice = any(other in physical or other.startswith("ib") for other in others)
    if not is_loopback and not has_choice:
        # NCCL compares prefixes, unless the name follows "="
        is_prefix = any(other.startswith(name) for other in others)
        found["NCCL_SOCKET_IFNAME"] = f"={name}" if is_prefix else name
    if backend == "npu" and not is_loopback and not environ.get("HCCL_IF_IP"):
        found["HCCL_SOCKET_IFNAME"] = f"={name}"
    return {variable: value for variable, value in found.items() if not environ.get(variable)}


def record_interface_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return INTERFACES_VARIABLE for variables that this process sets; nothing without any."""
    text = ",".join(f"{name}={value}" for name, value in variables.items())
    return {INTERFACES_VARIABLE: text} if text else {}


def recorded_interface_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the recorded variables that still have their recorded value."""
    record = environ.get(INTERFACES_VARIABLE, "")
    pairs = [part.partition("=") for part in record.split(",")]
    return frozenset(name for name, _, value in pairs if name and environ.get(name) == value)


def is_in_kubernetes(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process runs in a container of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in (os.environ if environ is None else environ)
