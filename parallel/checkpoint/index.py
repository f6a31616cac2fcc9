"""
Reads the JSON files of a checkpoint and checks every value in them.

A checkpoint may be damaged, or made to harm. So only regular files are opened, sizes are bounded,
and each value has its type and range before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.regions import DimRanges, count_elements
from pdrun.parallel.checkpoint.storage import (
    BLOCK_BYTES,
    DTYPES,
    READABLE_VERSIONS,
    TensorPiece,
    read_json,
)
from pdrun.text import escape_text

MAX_DIMS = 64
MAX_INTEGER = (1 << 63) - 1
_INDEX_NAME = re.compile(r"rank-[0-9]{1,9}\.json")
_DATA_NAME = re.compile(r"rank-[0-9]{1,9}\.bin")
_FIELDS = frozenset(("name", "dtype", "shape", "start", "stop"))
_OPTIONAL_FIELDS = frozenset(("file", "offset", "crc", "crcs", "ranges"))


def read_index(folder: Path) -> tuple[dict[str, Any], list[TensorPiece]]:
    """
    Return the contents of run.json, and all pieces of all tensors.

    Raises:
        ConfigError: a file is missing or damaged, or has an unknown format.
    """
    try:
        run = read_json(folder / "run.json")
        _check(isinstance(run, dict), "run.json is not an object")
        names = run.get("indices")
        _check(
            isinstance(names, list)
            and all(isinstance(name, str) and _INDEX_NAME.fullmatch(name) for name in names)
            and len({*names}) == len(names),
            "indices in run.json must be a list of different rank-N.json",
        )
        version = run.get("format")
        if type(version) is not int or version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            what = f"has format {escape_text(str(version))[:40]}, this pdrun reads {readable}"
            raise ConfigError(what, where=str(folder))
        pieces: list[TensorPiece] = []
        for name in names:
            entries = read_json(folder / name)
            _check(isinstance(entries, list), f"{name} is not a list")
            pieces += [_parse_piece(entry, name) for entry in entries]
    except (OSError, ValueError, MemoryError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(f"is not a complete checkpoint ({reason})", where=str(folder)) from None
    return run, pieces


def check_run(run: Mapping[str, Any], where: Path) -> None:
    """
    Check what run.json must contain in addition to the format and the names of the indices.

    Raises:
        ConfigError: a value is missing, or has another type or range.
    """
    position = run.get("position")
    scale = run.get("scale")
    checks = {
        "steps": _is_count(run.get("steps")),
        "seed": type(run.get("seed")) is int,
        "position": isinstance(position, list)
        and len(position) == 2
        and all(map(_is_count, position)),
        "world": _is_count(run.get("world")),
        "groups": _has_objects(run.get("groups", [])),
        "scheduler": isinstance(run.get("scheduler", {}), dict | None),
        "scale": scale is None
        or (
            isinstance(scale, list)
            and len(scale) == 2
            and type(scale[0]) in (int, float)
            and _is_count(scale[1])
        ),
        "made": _is_fingerprint(run.get("made")),
    }
    for name, is_right in checks.items():
        if not is_right:
            raise ConfigError(f"run.json is damaged: {name}", where=str(where))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _has_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_fingerprint(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not {"optimizer", "scheduler"} <= value.keys():
        return False
    members = value.get("members", [])
    return isinstance(members, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group)
        for group in members
    )


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


def _parse_piece(entry: Any, index: str) -> TensorPiece:
    """
    Return the piece of an index entry.

    Raises:
        ValueError: a value is missing, or has another type or range.
    """
    _check(isinstance(entry, dict), f"{index} has an entry that is not an object")
    name = entry.get("name")
    _check(isinstance(name, str) and bool(name), f"{index} has an entry without a name")
    where = f"{index}: {escape_text(name)[:200]}"
    missing = _FIELDS - entry.keys()
    unknown = entry.keys() - _FIELDS - _OPTIONAL_FIELDS
    _check(not missing and not unknown, f"{where} lacks a value, or has an unknown one")
    shape = entry["shape"]
    _check(
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(map(_is_count, shape))
        and prod(shape) <= MAX_INTEGER,
        f"{where} has a wrong shape",
    )
    dtype = entry["dtype"]
    _check(isinstance(dtype, str) and dtype in DTYPES, f"{where} has an unknown type")
    ranges = _parse_ranges(entry.get("ranges"), shape, where)
    count = prod(shape) if ranges is None else count_elements(ranges)
    start = entry["start"]
    stop = entry["stop"]
    _check(
        _is_count(start) and _is_count(stop) and start <= stop <= count,
        f"{where} has elements that its ranges lack",
    )
    file = entry.get("file", "")
    _check(
        isinstance(file, str) and bool(_DATA_NAME.fullmatch(file)),
        f"{where} is outside of the folder, or not in rank-N.bin",
    )
    _check(_is_count(entry.get("offset", 0)), f"{where} has a wrong offset")
    size = (stop - start) * DTYPES[dtype].itemsize
    crcs = entry.get("crcs")
    _check(
        crcs is None
        or (
            isinstance(crcs, list)
            and len(crcs) == -(-size // BLOCK_BYTES)
            and all(map(_is_count, crcs))
        ),
        f"{where} has wrong checksums",
    )
    _check(_is_count(entry.get("crc", 0)), f"{where} has a wrong checksum")
    return TensorPiece(
        **{
            **entry,
            "shape": tuple(shape),
            "ranges": ranges,
            "crcs": None if crcs is None else tuple(crcs),
        }
    )


def _parse_ranges(value: Any, shape: list[int], where: str) -> tuple[DimRanges, ...] | None:
    if value is None:
        return None
    what = f"{where} has wrong ranges"
    _check(isinstance(value, list) and len(value) == len(shape), what)
    found: list[DimRanges] = []
    for dim, size in zip(value, shape, strict=True):
        _check(isinstance(dim, list), what)
        end = 0
        pairs: list[tuple[int, int]] = []
        for pair in dim:
            _check(isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)), what)
            low, high = pair
            _check(end <= low <= high <= size, what)
            end = high
            pairs.append((low, high))
        found.append(tuple(pairs))
    return tuple(found)
