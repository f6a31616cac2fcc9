"""Calls of the CUDA driver: copies between devices, and counters that streams write and await."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

UNIFIED_MEMORY = 4
"""CU_MEMORYTYPE_UNIFIED: the driver finds by the address where memory is."""
_SIDE_FIELDS = {
    "x": ctypes.c_size_t,
    "y": ctypes.c_size_t,
    "kind": ctypes.c_int,
    "host": ctypes.c_void_p,
    "device": ctypes.c_void_p,
    "array": ctypes.c_void_p,
    "pitch": ctypes.c_size_t,
}


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver: the source, the target, and how much is copied."""

    _fields_: ClassVar[Any] = [
        *(
            (f"{side}_{name}", kind)
            for side in ("from", "to")
            for name, kind in _SIDE_FIELDS.items()
        ),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    ]


def load_driver() -> Any:
    """Return the CUDA driver; None without a driver that has operations of streams on memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            getattr(driver, name).argtypes = [
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_uint32,
                ctypes.c_uint,
            ]
        driver.cuMemcpyAsync.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return driver


def write_counter(driver: Any, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Have a stream write a 32-bit value to memory of any device."""
    _check_result(driver.cuStreamWriteValue32_v2(stream.cuda_stream, address, value, 0))


def wait_counter(driver: Any, stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Have a stream wait until a 32-bit counter reaches a value (modulo 2**32)."""
    _check_result(driver.cuStreamWaitValue32_v2(stream.cuda_stream, address, value % 2**32, 0))


def copy_rows(
    driver: Any, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
) -> None:
    """
    Have a copy engine copy ``[rows, ...]`` between any two devices; each row must be contiguous.
    """
    rows = len(source)
    width = source[0].numel() * source.element_size()
    source_pitch = source.stride(0) * source.element_size()
    target_pitch = target.stride(0) * target.element_size()
    if rows == 1 or source_pitch == target_pitch == width:
        _check_result(
            driver.cuMemcpyAsync(
                target.data_ptr(), source.data_ptr(), rows * width, stream.cuda_stream
            )
        )
        return
    params = _Memcpy2D(
        from_kind=UNIFIED_MEMORY,
        from_device=source.data_ptr(),
        from_pitch=source_pitch,
        to_kind=UNIFIED_MEMORY,
        to_device=target.data_ptr(),
        to_pitch=target_pitch,
        width=width,
        rows=rows,
    )
    _check_result(driver.cuMemcpy2DAsync_v2(ctypes.byref(params), stream.cuda_stream))


def _check_result(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver returned error {code} for a stream memory operation")
