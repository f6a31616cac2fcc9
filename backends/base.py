"""
A device kind: a frozen table of facts, and a probe that finds its devices without torch.

Each kind is a file in this folder. To add a kind, copy the most similar file and add it to
`detect.KINDS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

from pdrun.quick_dataclass import dataclass
from pdrun.topology import Device


@dataclass(frozen=True)
class ToolAnswer:
    """Result of a vendor's tool. Tools run only if files do not suffice, for at most 3 seconds."""

    state: Literal["ok", "missing", "failed", "hung"]
    text: str = ""
    """Standard output; for ``failed`` the reason in one line."""


ToolRunner = Callable[[Sequence[str]], ToolAnswer]
"""Runs a tool, bounded in time and output; see `pdrun.backends.tools`."""


@dataclass(frozen=True)
class TorchBuild:
    """The accelerators that the installed torch supports, read from its version file."""

    version: str
    kinds: frozenset[str]
    """Names of backends; cpu always, mps on a Mac, npu if torch_npu is installed."""


@dataclass(frozen=True)
class ProbeEnvironment:
    """Everything that a probe may read; a test passes a file tree and a fake tool."""

    root: Path
    environ: Mapping[str, str]
    run_tool: ToolRunner
    platform: str
    """As `sys.platform` has it."""
    machine: str
    """As `os.uname` has it: ``x86_64``, ``arm64``."""

    def read_text(self, path: str) -> str:
        """Return a small file's text, stripped; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def list_numbered(self, folder: str, pattern: str) -> tuple[tuple[int, str], ...]:
        """Return (number, path) of the entries that match; the pattern's group is the number."""
        try:
            names = os.listdir(self.root / folder)  # noqa: PTH208 - names are all that is needed
        except OSError:
            return ()
        found = ((re.fullmatch(pattern, name), name) for name in names)
        return tuple(sorted((int(match[1]), f"{folder}/{name}") for match, name in found if match))

    def is_accessible(self, path: str) -> bool:
        """
        Return whether this process may open a device node for reading and writing.

        access(2) checks the same as open(2), including the device cgroup of a container or of
        Slurm, but does not wake up the device.
        """
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def has_path(self, path: str) -> bool:
        """Return whether a path exists."""
        return (self.root / path).exists()


@dataclass(frozen=True)
class DetectedDevice:
    """A device as the driver shows it, before any visibility variable."""

    name: str
    """Its name in the innermost visibility variable: ``"3"``, ``"MIG-3f1e..."``."""
    uuid: str = ""
    """``GPU-055ee11a-...``; empty: unknown."""
    parent: str = ""
    """Number of the card whose slice it is; empty if it is a card."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a kind's probe."""

    found: tuple[DetectedDevice, ...]
    reason: str
    """``8 devices by /dev/nvidiaN, driver 580.159.04``, or why there are none."""
    is_blind: bool = False
    """There are devices that only a visibility variable can name: MIG is on, its tool fails."""


@dataclass(frozen=True)
class VisibilityVariable:
    """A visibility variable and the grammar of its comma-separated list."""

    name: str
    alias: str = ""
    """Another variable that is read if this one is unset."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of names that it accepts in addition to numbers: ``GPU-``, ``MIG-``."""
    has_ranges: bool = False
    """Whether ``0-3`` means four devices (pdrun passes on the list of numbers)."""
    is_ascending: bool = False
    """Whether the runtime requires ascending numbers."""
    has_parts: bool = False
    """Whether ``0.1`` means a part of device 0."""


@dataclass(frozen=True)
class Backend:
    """The facts of a device kind."""

    name: str
    title: str
    """Name for display: ``NVIDIA GPU (CUDA)``."""
    variables: tuple[VisibilityVariable, ...]
    """
    Outermost first: each one numbers the devices that the previous one has left. The last one is
    set for a worker.
    """
    torch_device: str
    """The type in ``torch.device(type, index)``."""
    collective: str
    """torch.distributed's name of the backend for this device's tensors."""
    search: Callable[[ProbeEnvironment], SearchResult] = field(repr=False, compare=False)
    plugin: str = ""
    """A package that must be imported before torch supports the device."""
    has_indices: bool = True
    """Whether a process can have several devices; cpu and mps have one."""


@dataclass(frozen=True)
class BackendProbe:
    """Result of a kind on this node."""

    name: str
    present: bool
    """Whether `auto` may choose it: a device is visible and the installed torch supports it."""
    reason: str
    """What was found, or why the kind cannot be used."""
    devices: tuple[Device, ...] = ()
    """Visible devices, in the order of the visibility variable."""
    broken: bool = False
    """The environment contradicts itself about this kind: an error if the kind is chosen."""
