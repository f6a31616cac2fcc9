"""
What a device kind is: one frozen table of facts, plus a probe that finds its devices without torch.

Each kind is one small file beside this one. To add a kind, copy the nearest file and add it to
`detect.KINDS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdrun.topology import Device


@dataclass(frozen=True)
class ToolAnswer:
    """
    What a vendor's tool said. It is asked only where files do not answer, and never for longer than
    3 seconds.
    """

    state: Literal["ok", "missing", "failed", "hung"]
    text: str = ""
    """Its standard output; for ``failed`` the reason in one line."""


ToolRunner = Callable[[Sequence[str]], ToolAnswer]
"""Runs a tool, bounded in time and output; see `pdrun.backends.tools.run`."""


@dataclass(frozen=True)
class TorchBuild:
    """
    Which accelerators the installed torch was built for, read from its version file without
    importing it.
    """

    version: str
    kinds: frozenset[str]
    """Names of backends; cpu always, mps on a Mac. npu is there when the package torch_npu is."""


@dataclass(frozen=True)
class ProbeEnvironment:
    """Everything that a probe may look at; a test passes a file tree and a fake tool."""

    root: Path
    environ: Mapping[str, str]
    run_tool: ToolRunner
    platform: str
    """As `sys.platform` has it."""
    machine: str
    """As `os.uname` has it: ``x86_64``, ``arm64``."""

    def read_text(self, path: str) -> str:
        """Return a small file's text, stripped; empty when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def list_numbered(self, folder: str, pattern: str) -> tuple[tuple[int, str], ...]:
        """
        Return (number, path) of the entries whose whole name matches; the pattern's group is the
        number.
        """
        try:
            names = os.listdir(self.root / folder)  # noqa: PTH208 - names are all that is needed
        except OSError:
            return ()
        found = ((re.fullmatch(pattern, name), name) for name in names)
        return tuple(sorted((int(match[1]), f"{folder}/{name}") for match, name in found if match))

    def is_accessible(self, path: str) -> bool:
        """
        Whether this process may open a device node for reading and writing.

        access(2) asks the kernel the same question as open(2), the device cgroup of a container or of Slurm included,
        but does not wake the device up.
        """
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def has_path(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path).exists()


@dataclass(frozen=True)
class DetectedDevice:
    """One device as the driver shows it, before any visibility variable."""

    name: str
    """What the innermost visibility variable calls it: ``"3"``, ``"MIG-3f1e..."``."""
    uuid: str = ""
    """``GPU-055ee11a-...``; empty when unknown."""
    parent: str = ""
    """Number of the card that it is a slice of; empty for a whole card."""


@dataclass(frozen=True)
class SearchResult:
    """What a kind's probe found out."""

    found: tuple[DetectedDevice, ...]
    reason: str
    """
    ``8 devices by /dev/nvidiaN, driver 580.159.04``, or why there is none. Names the file or tool.
    """
    is_blind: bool = False
    """
    Devices are there, but only a visibility variable can name them (MIG is on and its tool does not
    answer).
    """


@dataclass(frozen=True)
class VisibilityVariable:
    """A visibility variable and the grammar of its list; entries are separated by commas."""

    name: str
    alias: str = ""
    """A second variable that is read where this one is unset."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of the names that it takes beside numbers: ``GPU-``, ``MIG-``."""
    has_ranges: bool = False
    """Whether ``0-3`` is read as four devices (pdrun hands on the plain list)."""
    is_ascending: bool = False
    """Whether the runtime wants the numbers in ascending order."""
    has_parts: bool = False
    """Whether ``0.1`` names a part of device 0."""


@dataclass(frozen=True)
class Backend:
    """The facts of a device kind."""

    name: str
    title: str
    """For people: ``NVIDIA GPU (CUDA)``."""
    variables: tuple[VisibilityVariable, ...]
    """
    Outermost first: each one numbers what the one before has left. The last one is set for a
    worker.
    """
    torch_device: str
    """The type in ``torch.device(type, index)``."""
    collective: str
    """torch.distributed's name of the backend that moves this device's tensors."""
    search: Callable[[ProbeEnvironment], SearchResult] = field(repr=False, compare=False)
    plugin: str = ""
    """A package that must be imported before torch knows the device."""
    has_indices: bool = True
    """Whether a process chooses among several devices; cpu and mps have one."""


@dataclass(frozen=True)
class BackendProbe:
    """One kind's result on this node."""

    name: str
    present: bool
    """
    Whether `auto` may take it: at least one device is visible and the installed torch can use it.
    """
    reason: str
    """What was found, or why it was refused."""
    devices: tuple[Device, ...] = ()
    """
    Visible ones only, in the order of the visibility variable: what an outer scheduler hid stays
    hidden.
    """
    broken: bool = False
    """
    The environment contradicts itself about this kind: an error for whoever wants it, never a
    reason to go on.
    """
