"""
Weights in the safetensors format: eight bytes of length, a JSON header, the tensors' bytes.

The safetensors library is not used: it keeps a full file in memory.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.storage import byte_view, open_regular
from pdrun.parallel.model.shards import Shard
from pdrun.text import escape_text

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(RuntimeError, OverflowError, RecursionError),
)
"""Errors that a damaged header raises here or in torch."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the header's size, as in the library."""


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write tensors in the order of ``shapes``. The file appears when it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), wanted in zip(tensors, shapes, strict=True):
            assert name == wanted
            data = tensor.detach().to("cpu").contiguous()
            file.write(byte_view(data))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class SafetensorsFile:
    """
    An open safetensors file.

    Raises:
        ConfigError: the file is not in that format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                    raise ValueError(f"a header of {length} bytes")
                header = json.loads(file.read(length))
            self._start = 8 + length
            self.entries = {
                name: self._parse_entry(name, value, size)
                for name, value in header.items()
                if name != "__metadata__"
            }
            self._check_overlaps()
        except DAMAGE as error:
            reason = escape_text(str(error))
            raise ConfigError(f"is not a safetensors file ({reason})", where=str(path)) from None

    def _parse_entry(
        self, name: str, value: Any, size: int
    ) -> tuple[torch.dtype, tuple[int, ...], int]:
        dtype = DTYPES[value["dtype"]]
        shape = tuple(value["shape"])
        low, high = value["data_offsets"]
        if not all(type(number) is int for number in (*shape, low, high)):
            raise ValueError("a shape or an offset is not an integer")
        if (
            min(shape, default=0) < 0
            or high - low != torch.Size(shape).numel() * dtype.itemsize
            or not 0 <= low <= high
        ):
            raise ValueError(f"offsets and shape of {name[:200]} differ")
        if high > size - self._start:
            missing = high - size + self._start
            raise ValueError(f"it is truncated: {name[:200]} lacks {missing:,} bytes")
        return dtype, shape, low

    def _check_overlaps(self) -> None:
        end, before = 0, ""
        for name, (dtype, shape, low) in sorted(self.entries.items(), key=lambda one: one[1][2]):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if nbytes and low < end:
                raise ValueError(f"{name[:200]} and {before[:200]} have the same bytes")
            if nbytes:
                end, before = low + nbytes, name

    def read_tensor(self, name: str) -> torch.Tensor:
        """
        Return a tensor, on the host.

        Raises:
            ConfigError: the file has no tensor of that name, or is too short.
        """
        if name not in self.entries:
            raise ConfigError(f"has no {escape_text(name)}", where=str(self.path))
        dtype, shape, offset = self.entries[name]
        out = torch.empty(shape, dtype=dtype)
        if not out.numel():
            return out
        with open_regular(self.path) as file:
            file.seek(self._start + offset)
            if file.readinto(byte_view(out)) != out.numel() * out.element_size():
                raise ConfigError("is too short", where=str(self.path))
        return out

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """
        Return a shard of a tensor, on the host; only the pages of its bytes are read.

        Raises:
            ConfigError: the file has no tensor of that name, or has become shorter.
        """
        if shard.is_full:
            return self.read_tensor(name)
        dtype, shape, offset = self.entries[name]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start = self._start + offset
        with open_regular(self.path) as file:
            if os.fstat(file.fileno()).st_size < start + nbytes:
                raise ConfigError(f"is too short for {escape_text(name)}", where=str(self.path))
            # torch wants memory that it may write; the view keeps the mapping and is not written
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=start)
        return shard.take_from(flat.view(dtype).view(shape))
