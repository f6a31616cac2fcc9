"""
Which server has an id or a piece of a dense weight. Pure; equal on every worker and server.

An id belongs to one of 1,024 virtual shards, and a shard to a server by rendezvous hashing. With
another number of servers only the shards move that must. A dense weight is cut into pieces of
`PIECE_ELEMENTS`, which the servers take in turn.
"""

from __future__ import annotations

import zlib
from functools import cache

import torch

from pdrun.parallel.rng.hashing import mix_bits

SHARDS = 1024
PIECE_ELEMENTS = 1 << 18
"""1 MiB in fp32: a piece stays in the cache between the socket and the optimizer."""
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""splitmix64's, as signed numbers."""


@cache
def shard_owners(servers: int) -> torch.Tensor:
    """Return the server of each virtual shard."""
    owners = [
        max(range(servers), key=lambda server: (mix_bits(shard, server + 1), server))
        for shard in range(SHARDS)
    ]
    return torch.tensor(owners)


@cache
def name_seed(name: str) -> int:
    """Return a number made of a table's name."""
    return zlib.crc32(name.encode())


def find_owners(ids: torch.Tensor, name: str, servers: int) -> torch.Tensor:
    """Return the server of each id of a table."""
    x = ids ^ name_seed(name)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIERS[1]
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return shard_owners(servers).index_select(0, x & (SHARDS - 1))


def count_pieces(size: int) -> int:
    """Return the number of pieces of a dense weight."""
    return -(-size // PIECE_ELEMENTS)


def piece_bounds(piece: int, size: int) -> tuple[int, int]:
    """Return the elements of a piece: first, and one after the last."""
    return piece * PIECE_ELEMENTS, min(size, (piece + 1) * PIECE_ELEMENTS)


def piece_owner(piece: int, name: str, servers: int) -> int:
    """Return the server of a piece."""
    return (name_seed(name) + piece) % servers
