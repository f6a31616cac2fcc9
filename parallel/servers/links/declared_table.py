"""A table that a client has declared, and which server has which part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdrun.parallel.servers.links.row_cache import RowCache
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.sharding import count_pieces, find_owners, piece_bounds, piece_owner


@dataclass
class DeclaredTable:
    """A declared table, with its number at each server."""

    spec: TableSpec
    numbers: list[int]
    cache: RowCache | None = None

    def split_ids(
        self, ids: torch.Tensor, *, every: bool = False
    ) -> list[tuple[int, torch.Tensor | None]]:
        """
        Return (server, positions of its ids; None: all).

        Args:
            every: name servers without ids too: they count updates.
        """
        servers = len(self.numbers)
        if servers == 1:
            return [(0, None)]
        owners = find_owners(ids, self.spec.name, servers)
        found = [(server, (owners == server).nonzero().squeeze(1)) for server in range(servers)]
        return [(server, mine) for server, mine in found if every or len(mine)]

    def list_pieces(self) -> list[tuple[int, int, int, int]]:
        """Return (piece, server, first element, one after the last)."""
        spec = self.spec
        return [
            (
                piece,
                piece_owner(piece, spec.name, len(self.numbers)),
                *piece_bounds(piece, spec.size),
            )
            for piece in range(count_pieces(spec.size))
        ]

    def split_pieces(self, flat: torch.Tensor) -> dict[int, tuple[list[int], list[torch.Tensor]]]:
        """Return the pieces of a flat tensor by server, with their numbers."""
        found: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        for piece, server, first, last in self.list_pieces():
            pieces, parts = found.setdefault(server, ([], []))
            pieces.append(piece)
            parts.append(flat[first:last])
        return found
