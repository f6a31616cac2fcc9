"""
Built-in topologies: data sheets and experience, marked as guesses. ``pdrun doctor --calibrate``
replaces them.
"""

from __future__ import annotations

from pdrun.errors import ConfigError
from pdrun.parallel.auto.topology import ComputeRate, DeviceRates, LinkLevel, Topology

GIB = 2**30
GPU_PRODUCTS = ((256.0, 0.18), (1024.0, 0.45), (4096.0, 0.66), (16384.0, 0.70))
"""Share of the peak that products on accelerators attain, by size."""
USABLE_SHARE = 0.92
MEMORY_SHARE = 0.75
"""Share of a data sheet's memory bandwidth that operators attain."""
LAUNCH_SECONDS = 3e-6


def _make_accelerator(
    name: str, memory_gib: int, memory_rate: float, narrow: float, wide: float, links: float
) -> Topology:
    """Return nodes of eight accelerators on a network of 400 Gbit/s per device."""
    kinds = {
        "bf16": ComputeRate(narrow, GPU_PRODUCTS),
        "fp16": ComputeRate(narrow, GPU_PRODUCTS),
        "fp32": ComputeRate(wide, GPU_PRODUCTS),
    }
    device = DeviceRates(
        memory_gib * GIB, USABLE_SHARE, memory_rate * MEMORY_SHARE, LAUNCH_SECONDS, kinds
    )
    levels = (LinkLevel("node", 2e-5, links, 8), LinkLevel("network", 4e-5, 4e10))
    return Topology(name, device, levels, is_guess=True, made="data sheet")


def _make_cpu() -> Topology:
    rate = ComputeRate(1e11, ((64.0, 0.2), (256.0, 0.5), (1024.0, 0.6)))
    device = DeviceRates(8 * GIB, 0.8, 1e10, 5e-6, {"fp32": rate})
    levels = (LinkLevel("node", 1e-4, 2e9, 8), LinkLevel("network", 2e-4, 1e9))
    return Topology("cpu", device, levels, is_guess=True, made="experience")


BUILTIN_TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology
    for topology in (
        _make_cpu(),
        _make_accelerator("a100x8", 80, 2.0e12, 3.12e14, 1.56e14, 2.4e11),
        _make_accelerator("h100x8", 80, 3.35e12, 9.89e14, 4.95e14, 3.3e11),
        _make_accelerator("h200x8", 141, 4.8e12, 9.89e14, 4.95e14, 3.3e11),
        _make_accelerator("910bx8", 64, 1.6e12, 3.2e14, 7.5e13, 1.5e11),
    )
}
DEVICE_NAMES = {"H200": "h200x8", "H100": "h100x8", "A100": "a100x8", "Ascend910B": "910bx8"}
"""Built-in topology by a part of the name that torch gives to a device."""


def find_topology(device_name: str) -> Topology:
    """
    Return the built-in topology of a device by torch's name of it.

    Raises:
        ConfigError: no built-in topology has such a device.
    """
    if device_name == "cpu":
        return BUILTIN_TOPOLOGIES["cpu"]
    for part, name in DEVICE_NAMES.items():
        if part.lower() in device_name.lower():
            return BUILTIN_TOPOLOGIES[name]
    raise ConfigError(
        f"no built-in topology for the device {device_name!r}",
        where="topology",
        hint="measure one with pdrun doctor --calibrate --save topology.json, or name one with"
        f" topology= ({', '.join(BUILTIN_TOPOLOGIES)})",
    )
