"""
Where weights are read from: a checkpoint of `Run.save`, of any mesh, or safetensors files.

Only the bytes of a rank's shard are read, one tensor after the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from pdrun.errors import ConfigError, did_you_mean
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, count_elements
from pdrun.parallel.checkpoint.safetensors import SafetensorsFile
from pdrun.parallel.checkpoint.storage import list_checkpoints, open_regular, read_json
from pdrun.parallel.model.shards import Shard
from pdrun.text import escape_text

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ZIP_BEGIN, PICKLE_BEGIN = b"PK\x03\x04", b"\x80"
"""First bytes of files of torch.save: of a zip file, or of a pickle."""
MAX_NAME_LENGTH = 255
HEADER_PLACE = 8
"""Of the header of a safetensors file, behind its length."""
WEIGHTS_HINT = "pass a folder of run.save, a .safetensors file, or a folder of such files"


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def place(self) -> str:
        """Name of the folder or file."""

    def names(self) -> Collection[str]:
        """Return the names of all weights and buffers."""

    def file_of(self, name: str) -> str:
        """Return the file that has a tensor, or its first part."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a shard of a tensor, on the host."""


def open_source(path: Path) -> WeightSource:
    """
    Return the source of weights at a path.

    Raises:
        ConfigError: it has no weights, or damaged ones.
    """
    if path.is_file() and path.name.endswith(INDEX_SUFFIX):
        return SafetensorsSource(path, _files_of_index(path))
    if path.is_file():
        return SafetensorsSource(path, {path: None})
    if not path.is_dir():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ConfigError(what, where=str(path), hint=WEIGHTS_HINT)
    if (path / "run.json").is_file():
        return CheckpointSource(path)
    steps = list_checkpoints(path)
    if steps:
        return CheckpointSource(steps[-1])
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise ConfigError(f"has several indices: {names}", where=str(path), hint="pass one of them")
    if indices:
        return SafetensorsSource(path, _files_of_index(indices[0]))
    files: dict[Path, Collection[str] | None] = dict.fromkeys(sorted(path.glob(f"*{SUFFIX}")))
    if not files:
        for file in sorted(path.iterdir()):
            if file.is_file() and file.suffix in PICKLE_SUFFIXES:
                _refuse_pickles(file)
        what = "has neither a complete checkpoint nor safetensors files"
        raise ConfigError(what, where=str(path), hint=WEIGHTS_HINT)
    return SafetensorsSource(path, files)


def _is_weight_file(name: str) -> bool:
    """Return whether a name is that of a file in the same folder, which can be printed."""
    is_name = Path(name).name == name and name.isprintable() and len(name) <= MAX_NAME_LENGTH
    return is_name and name.endswith(SUFFIX)


def _refuse_pickles(path: Path) -> None:
    """
    Refuse what torch.save has written: to read it is to run what it contains.

    Raises:
        ConfigError: the file is of that kind.
    """
    with open_regular(path) as file:
        begin = file.read(HEADER_PLACE + 1)
    is_safetensors = begin[HEADER_PLACE:] == b"{"
    if not is_safetensors and begin.startswith((ZIP_BEGIN, PICKLE_BEGIN)):
        what = "is a file of torch.save, which can run code when it is read"
        hint = "save the weights with safetensors: model.save_pretrained(folder)"
        raise ConfigError(what, where=str(path), hint=hint)


def _files_of_index(index: Path) -> dict[Path, Collection[str] | None]:
    """Return the names of the tensors by file, as an index of several files has them."""
    try:
        found = read_json(index)
    except (OSError, ValueError, RecursionError) as error:
        reason = escape_text(str(error))
        raise ConfigError(f"is not a JSON file ({reason})", where=str(index)) from None
    placed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ConfigError("has no weight_map", where=str(index), hint=WEIGHTS_HINT)
    files: dict[Path, set[str]] = {}
    for name, file in placed.items():
        if not isinstance(file, str) or not _is_weight_file(file):
            what = f"{escape_text(name)[:200]} is in {escape_text(json.dumps(file))[:200]}"
            raise ConfigError(
                f"{what}, which is not a safetensors file of this folder", where=str(index)
            )
        files.setdefault(index.parent / file, set()).add(name)
    return dict(files)


class CheckpointSource:
    """
    A checkpoint of `Run.save`: of any number of ranks, mesh and optimizer level.

    Raises:
        ConfigError: it is not complete.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = CheckpointReader(folder)
        self._stored = {
            name.partition("/")[2]: name
            for name in self._reader.tensor_names()
            if name.startswith(("weights/", "buffers/"))
        }

    @property
    def place(self) -> str:
        """Name of the folder."""
        return str(self._reader.folder)

    def names(self) -> Collection[str]:
        """Return the names of all weights and buffers."""
        return self._stored.keys()

    def file_of(self, name: str) -> str:
        """Return the file that has the first part of a tensor."""
        return self._reader.pieces_of(self._stored[name])[0].file

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        return self._reader.shape_of(self._stored[name])

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a shard of a tensor, on the host; checksums are compared."""
        region = Region(shard.shape, shard.ranges, 0, count_elements(shard.ranges))
        return self._reader.read_tensor(self._stored[name], region).view(shard.local_shape)


class SafetensorsSource:
    """
    Safetensors files.

    Args:
        path: names the source in errors.
        files: and the names that an index says each of them has; None: all that it has.

    Raises:
        ConfigError: a file is damaged, lacks a tensor of the index, or two files have the same.
    """

    def __init__(self, path: Path, files: dict[Path, Collection[str] | None]) -> None:
        self._path = path
        self._files: dict[str, SafetensorsFile] = {}
        for file, listed in files.items():
            try:
                opened = SafetensorsFile(file)
            except ConfigError:
                if file.is_file():
                    _refuse_pickles(file)
                raise
            for name in opened.entries if listed is None else sorted(listed):
                if name not in opened.entries:
                    raise ConfigError(
                        f"has no {escape_text(name)}, which the index says it has",
                        where=str(file),
                        hint=did_you_mean(name, opened.entries),
                    )
                if name in self._files:
                    what = f"{escape_text(name)} is in {self._files[name].path.name}, too"
                    hint = "pass the index of the files, or one file"
                    raise ConfigError(what, where=str(file), hint=hint)
                self._files[name] = opened

    @property
    def place(self) -> str:
        """Name of the folder or file."""
        return str(self._path)

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._files.keys()

    def file_of(self, name: str) -> str:
        """Return the file that has a tensor."""
        return self._files[name].path.name

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        entry: tuple[Any, tuple[int, ...], int] = self._files[name].entries[name]
        return entry[1]

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a shard of a tensor, on the host."""
        return self._files[name].read_shard(name, shard)
