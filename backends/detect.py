"""
Detect the device kinds of this node, with a reason for each one that cannot be used.

torch is not imported, and no tool runs if files suffice: about 1 ms on a machine without
accelerators.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Protocol

from pdrun.backends import cpu, cuda, mps, npu, rocm, xpu
from pdrun.backends.base import (
    Backend,
    BackendProbe,
    ProbeEnvironment,
    SearchResult,
    ToolAnswer,
    ToolRunner,
    TorchBuild,
)
from pdrun.backends.visibility import VisibleDevices, apply_visibility
from pdrun.errors import ConfigError, UsageError, did_you_mean
from pdrun.topology import Device

KINDS: Mapping[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (cuda, rocm, npu, xpu, mps, cpu)
}
"""Name -> table, in the order of `auto`."""


class ProbeResult(Protocol):
    """What `choose_backend` reads: a `BackendProbe`, or the launcher's copy of one."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        ...

    @property
    def present(self) -> bool:
        """Whether `auto` may choose it."""
        ...

    @property
    def reason(self) -> str:
        """What was found, or why it was refused."""
        ...

    @property
    def devices(self) -> tuple[Device, ...]:
        """Visible devices."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the environment contradicts itself about it."""
        ...


def get_backend(name: str) -> Backend:
    """Return the table of a kind; UsageError for an unknown name."""
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise UsageError(
            f"{name!r} is not one of {known}", where="--backend", hint=did_you_mean(name, KINDS)
        )
    return KINDS[name]


def probe_all(
    environ: Mapping[str, str],
    root: Path = Path("/"),
    run: ToolRunner | None = None,
    *,
    build: Callable[[], TorchBuild | None] | None = None,
    platform: str = sys.platform,
    machine: str | None = None,
) -> tuple[BackendProbe, ...]:
    """
    Probe every kind, in the order of `auto`; cpu is last and always present.

    Args:
        run: runs a vendor's tool; default: for at most 3 seconds.
        build: returns what the installed torch supports; called only if a device was found.
    """
    here = ProbeEnvironment(
        root, environ, run or _make_runner(environ), platform, machine or os.uname().machine
    )
    return tuple(_probe_backend(table, here, build or installed_torch) for table in KINDS.values())


def choose_backend(name: str, probes: Sequence[ProbeResult]) -> tuple[Backend, str]:
    """
    Return the table to use, and the reason, with every kind that `auto` has skipped.

    Raises:
        ConfigError: the requested kind cannot be used, or the environment contradicts itself.
        UsageError: unknown kind.
    """
    if name != "auto":
        chosen = next((probe for probe in probes if probe.name == get_backend(name).name), None)
        if chosen is None or chosen.broken or not chosen.devices:
            reason = chosen.reason if chosen else "it was not probed"
            raise ConfigError(
                f"{name} cannot be used: {reason}", where="--backend", hint=_list_usable(probes)
            )
        return KINDS[name], f"requested; {chosen.reason}"
    refused: list[str] = []
    for probe in probes:
        if probe.broken:
            raise ConfigError(
                probe.reason,
                where=probe.name,
                hint="correct it, or choose another kind with --backend",
            )
        if probe.present:
            return KINDS[probe.name], "; ".join([probe.reason, *refused])
        refused.append(f"not {probe.name}: {probe.reason}")
    raise ConfigError("no usable device kind", where="--backend", hint="; ".join(refused))


def installed_torch(path: Sequence[str] | None = None) -> TorchBuild | None:
    """
    Read what torch on ``path`` (default: sys.path) supports; None if torch is not installed.

    Its ``torch/version.py`` contains, for example: ``cuda: Optional[str] = None``, ``hip:
    Optional[str] = '6.4.43484'``.
    """
    file = find_version_file(path)
    if file is None:
        return None
    return parse_torch_version(
        file.read_text(encoding="utf-8", errors="replace"), npu=_has_npu(path)
    )


def find_version_file(path: Sequence[str] | None = None) -> Path | None:
    """Return torch's version file on ``path`` (default: sys.path); None: torch is missing."""
    for folder in sys.path if path is None else path:
        file = Path(folder or ".") / "torch/version.py"
        if file.is_file():
            return file
    return None


def parse_torch_version(text: str, *, npu: bool = False) -> TorchBuild:
    """Parse torch's version file; missing lines count as None."""
    versions = dict(re.findall(r"^(\w+)(?::[^=\n]+)?\s*=\s*['\"]([^'\"\n]+)['\"]", text, re.M))
    kinds = {"cpu", "mps"} | {
        kind for kind, key in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")) if key in versions
    }
    return TorchBuild(
        versions.get("__version__", "unknown"), frozenset(kinds | ({"npu"} if npu else set()))
    )


def _has_npu(path: Sequence[str] | None) -> bool:
    if path is None:
        return util.find_spec("torch_npu") is not None
    return any((Path(folder) / "torch_npu").is_dir() for folder in path)


def _probe_backend(
    table: Backend, here: ProbeEnvironment, build: Callable[[], TorchBuild | None]
) -> BackendProbe:
    search = table.search(here)
    if not search.found and not search.is_blind:
        return BackendProbe(table.name, False, search.reason)
    try:
        seen = apply_visibility(table, here.environ, search.found, blind=search.is_blind)
    except ConfigError as error:
        return BackendProbe(table.name, False, str(error), broken=True)
    reason = _format_reason(search, seen)
    if not seen.devices:
        return BackendProbe(table.name, False, reason)
    torch = build() if table.name != "cpu" else None
    if torch is not None and table.name not in torch.kinds:
        without = f"torch {torch.version} is built without {table.name}"
        lack = f"{table.plugin} is not installed" if table.plugin else without
        return BackendProbe(table.name, False, f"{reason}, but {lack}", seen.devices)
    return BackendProbe(table.name, True, reason, seen.devices)


def _format_reason(search: SearchResult, seen: VisibleDevices) -> str:
    if not seen.note:
        return search.reason
    if seen.devices:
        return f"{search.reason}, {seen.note}"
    return f"{search.reason}, all hidden: {seen.note}"


def _list_usable(probes: Sequence[ProbeResult]) -> str:
    here = [probe.name for probe in probes if probe.present]
    return f"usable here: {', '.join(here)}" if here else ""


def _make_runner(environ: Mapping[str, str]) -> ToolRunner:
    """Return the real tool runner; subprocess is imported only when a tool runs."""

    def ask(command: Sequence[str]) -> ToolAnswer:
        from pdrun.backends.tools import make_tool_runner

        return make_tool_runner(environ)(command)

    return ask
