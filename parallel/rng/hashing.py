"""
Hashes of integers as a source of random numbers: the same on every device and number of ranks.
"""

from __future__ import annotations

import torch

MASK_64_BITS = (1 << 64) - 1
CHUNK_ELEMENTS = 65536
"""Elements of a chunk on a CPU."""
_MASK_31_BITS = 0x7FFFFFFF


def mix_bits(*numbers: int) -> int:
    """Return 63 well mixed bits of some whole numbers (splitmix64's finaliser, chained)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK_64_BITS) + 0x9E3779B97F4A7C15) & MASK_64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64_BITS
        state ^= state >> 31
    return state >> 1


def _scramble_bits(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each 32-bit integer, in place (murmur3's finaliser)."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85ebca6b
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xc2b2ae35
    x ^= (x >> 16) & 0xFFFF
    return x


def hash_uniform31(key: int, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """
    Return ``[len(rows), len(places)]`` integers, uniform in 0..2**31 - 1: a hash of key, row,
    place.

    Args:
        key: 63 bits.
        rows: global indices, int32.
        places: positions of elements in their row, int32.
    """
    row = _scramble_bits(rows ^ ((key & MASK_64_BITS) >> 32))
    place = _scramble_bits(places + (key & _MASK_31_BITS))
    return _scramble_bits(place.unsqueeze(0) ^ row.unsqueeze(1)) & _MASK_31_BITS


def hash_int32(key: int, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """
    Return ``[len(rows), len(places)]`` integers, uniform in -2**31..2**31 - 1; their high bits are
    well mixed, in half of the time of `hash_uniform31`.

    Args:
        key, rows, places: as for `hash_uniform31`.
    """
    row = _scramble_bits(rows ^ ((key & MASK_64_BITS) >> 32))
    place = _scramble_bits(places + (key & _MASK_31_BITS))
    x = place.unsqueeze(0) ^ row.unsqueeze(1)
    x *= -2048144789  # 0x85ebca6b
    x ^= x >> 15
    x *= -1028477387  # 0xc2b2ae35
    return x


def keep_mask(key: int, rows: torch.Tensor, places: torch.Tensor, limit: int) -> torch.Tensor:
    """
    Return where `hash_uniform31` is at least ``limit``; on a CPU in chunks that fit the cache.
    """
    piece = len(rows)
    if rows.device.type == "cpu":
        piece = max(1, CHUNK_ELEMENTS // max(len(places), 1))
    return torch.cat([hash_uniform31(key, some, places) >= limit for some in rows.split(piece)])


def keep_elements(key: int, rows: torch.Tensor, places: torch.Tensor, limit: int) -> torch.Tensor:
    """Return where the hash of each element's own row and place is at least ``limit``."""
    row = _scramble_bits(rows ^ ((key & MASK_64_BITS) >> 32))
    return (
        _scramble_bits(_scramble_bits(places + (key & _MASK_31_BITS)) ^ row) & _MASK_31_BITS
    ) >= limit
