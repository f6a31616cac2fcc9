"""
The peak of this process's device: what the use of a model's FLOPs (MFU) is measured against.

    PDRUN_PEAK_FLOPS=9.89e14            FLOP per second of one device
    PDRUN_PEAK_FLOPS=topology.json      what `pdrun doctor --calibrate` has measured, or a built-in
                                        topology's name

Without it the built-in table of data sheets counts (`builtin_topologies`). A CPU has no entry.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from typing import Any

from pdrun.errors import ConfigError
from pdrun.parallel.auto.builtin_topologies import find_device_peaks
from pdrun.parallel.auto.topology import Topology

PEAK_VARIABLE = "PDRUN_PEAK_FLOPS"
NARROW_KINDS = ("bf16", "fp16")


@dataclass(frozen=True)
class DevicePeak:
    """FLOP per second of one device, for one number type, and where that is from."""

    flops: float
    kind: str
    """Number type; empty: not said."""
    source: str

    def describe(self) -> str:
        """Return ``989 TFLOP/s bf16``."""
        return f"{self.flops / 1e12:.4g} TFLOP/s {self.kind}".rstrip()


def find_peak(kind: str = "", topology: Topology | None = None) -> DevicePeak | None:
    """
    Return the peak of this process's device; None: it is not known.

    Args:
        kind: number type of products: "bf16", "fp16", "tf32" or "fp32"; empty: the narrow one of
            the device, as of a script with mixed precision.
        topology: what the run was planned for, if that was given.

    Raises:
        ConfigError: PDRUN_PEAK_FLOPS is neither a number above 0 nor a topology.
    """
    text = os.environ.get(PEAK_VARIABLE, "").strip()
    if text:
        return _read_variable(text, kind)
    if topology is not None and not topology.is_guess:
        return _peak_of_topology(topology, kind, f"topology {topology.name}")
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        module = getattr(torch, "npu", None)
        if module is None or not module.is_available():
            return None
    else:
        module = torch.cuda
    found = find_device_peaks(str(module.get_device_name()))
    if found is None:
        return None
    name, peaks = found
    for candidate in (kind,) if kind else NARROW_KINDS:
        if candidate in peaks:
            return DevicePeak(peaks[candidate], candidate, f"built-in table, {name}")
    return None


def _read_variable(text: str, kind: str) -> DevicePeak:
    try:
        number = float(text)
    except ValueError:
        from pdrun.parallel.auto.topology_file import load_topology

        return _peak_of_topology(load_topology(text), kind, f"{PEAK_VARIABLE}, {text}")
    if not (math.isfinite(number) and number > 0):
        what = f"must be FLOP per second of one device, above 0, got {text}"
        raise ConfigError(what, where=PEAK_VARIABLE, hint="9.89e14, or a topology's file or name")
    return DevicePeak(number, "", f"variable {PEAK_VARIABLE}")


def _peak_of_topology(topology: Topology, kind: str, source: str) -> DevicePeak:
    kinds = topology.device.kinds
    wanted = {"tf32": "fp32"}.get(kind, kind) or next((k for k in NARROW_KINDS if k in kinds), "")
    chosen = wanted if wanted in kinds else next(iter(kinds))
    made = "data sheet" if topology.is_guess else "measured"
    return DevicePeak(kinds[chosen].peak, chosen, f"{source}, {made}")
