"""
Compose lists of visible devices: what an outer scheduler has hidden stays hidden for workers. Pure.

The rules are the vendors', so that pdrun counts the devices that a worker's process will count:

* ``CUDA_VISIBLE_DEVICES`` (observed on two H100, driver 580): the list ends at the first entry that
  is not a device, so ``0,9,1`` shows one. ``-1``, the empty text and ``NoDevFiles`` show none. With
  a device named twice the driver fails. A UUID may be shortened while it is unambiguous, in either
  case. A number after a UUID ends the list.
* ``ROCR_VISIBLE_DEVICES`` is applied first. ``HIP_VISIBLE_DEVICES`` numbers the devices that it has
  left. HIP reads CUDA's list if its own is unset.
* ``ASCEND_RT_VISIBLE_DEVICES``: ascending numbers. The runtime does not support ranges, but the
  container runtime's variable does. pdrun reads ``0-3`` and passes on ``0,1,2,3``.
* ``ZE_AFFINITY_MASK``: ``1`` is a device, ``1.0`` is a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdrun.backends.base import Backend, DetectedDevice, VisibilityVariable
from pdrun.errors import ConfigError, PdrunError
from pdrun.quick_dataclass import dataclass
from pdrun.topology import Device


@dataclass(frozen=True)
class VisibleDevices:
    """The devices that all visibility variables leave."""

    devices: tuple[Device, ...]
    note: str = ""
    """Effect of the variables: ``2 of 8 by CUDA_VISIBLE_DEVICES=4,5``; empty: none is set."""


@dataclass(frozen=True)
class DeviceGrant:
    """The device of a worker."""

    variables: Mapping[str, str]
    """Variables to set in its environment."""
    index: int
    """Index of its device among the devices that it sees."""


def apply_visibility(
    backend: Backend,
    environ: Mapping[str, str],
    found: Sequence[DetectedDevice],
    *,
    blind: bool = False,
) -> VisibleDevices:
    """
    Apply the visibility variables to the devices that the driver shows.

    Args:
        blind: the devices could not be listed. Then names in a list are accepted unchecked, and
            numbers are not.

    Raises:
        ConfigError: the vendor's runtime would refuse or misread a list.
    """
    left = list(found)
    notes = []
    for position, variable in enumerate(backend.variables):
        source = _effective_variable(variable, environ)
        if source:
            before = len(left)
            left = _select_devices(variable, source, environ[source], left, blind=blind)
            notes.append(
                f"{len(left)}{'' if blind else f' of {before}'} by {source}={environ[source]}"
            )
        if position + 1 < len(backend.variables) and source:
            left = [replace(item, name=str(number)) for number, item in enumerate(left)]
    devices = tuple(Device(backend.name, number, item.name) for number, item in enumerate(left))
    return VisibleDevices(devices, ", ".join(notes))


def restrict_to_device(
    backend: Backend, device: Device, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that show a worker only this device, as index 0; see expose_devices."""
    return expose_devices(backend, (device,), environ)


def expose_devices(
    backend: Backend, devices: Sequence[Device], environ: Mapping[str, str]
) -> dict[str, str]:
    """
    Return the variables that show a worker these devices, in this order.

    Empty for kinds without such a variable.

    Raises:
        PdrunError: ``environ`` hides a device; pdrun never extends a list.
    """
    if not backend.variables or not devices:
        return {}
    variable = backend.variables[-1]
    source = _effective_variable(variable, environ)
    names = [device.name or str(device.index) for device in devices]
    if source:
        shown = {
            _normalize_entry(entry) for entry in _parse_list(variable, source, environ[source])
        }
        for name in names:
            if _normalize_entry(name) not in shown:
                raise PdrunError(
                    f"device {name} is not among {source}={environ[source]}", where=backend.name
                )
    return {variable.name: ",".join(names)}


def grant_devices(
    backend: Backend, devices: Sequence[Device], environ: Mapping[str, str]
) -> tuple[DeviceGrant, ...]:
    """
    Assign a node's devices to its workers, one each, in this order.

    Every worker sees all devices, and its own is ``cuda:LOCAL_RANK``, as scripts for torchrun
    expect. MIG instances are the exception: a process can use only one, so each worker sees only
    its own.
    """
    if any(device.name.startswith("MIG-") for device in devices):
        return tuple(
            DeviceGrant(restrict_to_device(backend, device, environ), 0) for device in devices
        )
    shared = expose_devices(backend, devices, environ)
    return tuple(
        DeviceGrant(shared, index if backend.has_indices else 0) for index, _ in enumerate(devices)
    )


def _effective_variable(variable: VisibilityVariable, environ: Mapping[str, str]) -> str:
    """Return the name of the variable or of its alias, if one is set, or the empty string."""
    return next((name for name in (variable.name, variable.alias) if name and name in environ), "")


def _normalize_entry(entry: str) -> str:
    """Return a device's name in normal form: two spellings of a device become equal."""
    prefix, dash, rest = entry.partition("-")
    return f"{prefix}-{rest.lower()}" if dash and not entry[0].isdigit() else entry


def _parse_list(variable: VisibilityVariable, source: str, text: str) -> list[str]:
    """Return the entries up to the first invalid one, in normal form; duplicates are an error."""
    entries: list[str] = []
    for raw in text.split(","):
        names = _parse_entry(variable, source, raw.strip())
        if not names or (entries and entries[0][0].isdigit() != names[0][0].isdigit()):
            break
        for name in names:
            whole = name.partition(".")[0] if variable.has_parts else name
            if any(
                _normalize_entry(name) == _normalize_entry(old)
                or old == whole
                or old.startswith(f"{name}.")
                for old in entries
            ):
                raise ConfigError(f"{text!r} names device {name} twice", where=source)
            if variable.is_ascending and entries and int(name) < int(entries[-1]):
                raise ConfigError(
                    f"{text!r} is not in ascending order",
                    where=source,
                    hint="the runtime requires that",
                )
            entries.append(name)
    return entries


def _parse_entry(variable: VisibilityVariable, source: str, entry: str) -> list[str]:
    """Return the devices of an entry; empty: the list ends here."""
    if re.fullmatch("[0-9]{1,6}", entry):
        return [str(int(entry))]
    if variable.prefixes and entry.startswith(variable.prefixes):
        return [entry]
    if variable.has_parts and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})+", entry):
        return [".".join(str(int(part)) for part in entry.split("."))]
    span = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", entry) if variable.has_ranges else None
    if span and int(span[1]) <= int(span[2]):
        return [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
    if re.match("[+]?[0-9]", entry):  # the runtime would read the digits and ignore the rest
        raise ConfigError(
            f"{entry!r} is not a device", where=source, hint="write numbers separated by commas"
        )
    return []


def _select_devices(
    variable: VisibilityVariable,
    source: str,
    text: str,
    found: Sequence[DetectedDevice],
    *,
    blind: bool,
) -> list[DetectedDevice]:
    """Return the devices of a list, in its order, up to the first that does not exist."""
    chosen: list[DetectedDevice] = []
    for entry in _parse_list(variable, source, text):
        item = _find_device(entry, found, blind=blind)
        if item is None:
            break
        if item.uuid and any(item.uuid == old.uuid for old in chosen):
            raise ConfigError(f"{text!r} names device {entry} twice", where=source)
        chosen.append(item)
    return chosen


def _find_device(
    entry: str, found: Sequence[DetectedDevice], *, blind: bool
) -> DetectedDevice | None:
    """Return the device of an entry; None if it does not exist or is ambiguous."""
    if not entry[0].isdigit():
        known = [item for item in found if item.uuid]
        matches = [
            item
            for item in known
            if _normalize_entry(item.uuid).startswith(_normalize_entry(entry))
        ]
        if known and not blind:
            return replace(matches[0], name=entry) if len(matches) == 1 else None
        return DetectedDevice(entry) if blind or found else None
    number, _, part = entry.partition(".")
    if any(item.parent for item in found):
        # With MIG a number is a card, and the driver uses its first instance. Keep the number.
        if any(number == (item.parent or item.name) for item in found):
            return DetectedDevice(entry)
        return None
    if int(number) >= len(found):
        return None
    return DetectedDevice(entry) if part else replace(found[int(number)], name=number)
