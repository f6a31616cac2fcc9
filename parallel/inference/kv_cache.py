"""
Keys and values of earlier tokens, for attention that is written in plain torch.

    self.cache = pdrun.KVCache()                                   # in the attention's __init__

    places = self.cache.positions(x.shape[1], x.device)            # [1 or rows, length]
    k, v, mask = self.cache(k, v)                                  # [rows, heads, length, dim]

Attention has this mask; without one it is causal. Outside of `pdrun.infer` a cache has no memory
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pdrun.errors import UsageError

CACHE_API = "pdrun.KVCache"
HEADS_DIM, LENGTH_DIM = 1, 2


class CachedRows:
    """
    What all caches of a model contain of some rows.

    Rows begin in the first place. What the places beyond a row's end contain is hidden from its
    tokens, and overwritten by them.

    Args:
        places: of each row.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        """``[rows, length]``: of the tokens that the model is called with."""
        self.memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values by the id of their cache."""
        self.used: set[int] = set()
        """Ids of the caches that were called in this pass."""

    @contextmanager
    def bound_to(self, caches: Sequence[KVCache], positions: torch.Tensor) -> Iterator[None]:
        """
        Inside, the model is called with the tokens of these positions.

        Raises:
            UsageError: the model did not call one of its caches.
        """
        self.positions = positions
        self.used.clear()
        for cache in caches:
            cache._rows = self
        try:
            yield
        finally:
            for cache in caches:
                cache._rows = None
        if len(self.used) != len(caches):
            what = f"forward called {len(self.used)} of the model's {len(caches)} caches"
            raise UsageError(
                what, where=CACHE_API, hint="call each of them once, with keys, values"
            )


class KVCache(nn.Module):
    """
    Keys and values of the tokens before, which `pdrun.infer` fills while it generates.

    Each attention has its own. Without `pdrun.infer` it returns what it gets.
    """

    _rows: CachedRows | None = None

    def forward(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Return all keys and values up to these tokens, and which of them each token may see.

        Args:
            keys, values: ``[rows, heads, length, dim]`` of the tokens that the model is called
                with; heads of this rank.

        Returns:
            Keys, values, and ``attn_mask`` ``[rows, 1, length, places]``; None instead of it if
            there are no tokens before: attention is causal then.

        Raises:
            UsageError: they are not those of the tokens, or the cache is used twice in a pass.
        """
        found = self._rows
        if found is None:
            return keys, values, None
        if id(self) in found.used:
            what = "a cache is called twice in one forward"
            raise UsageError(what, where=CACHE_API, hint="give each attention its own KVCache")
        found.used.add(id(self))
        rows, length = found.positions.shape
        for name, given in (("keys", keys), ("values", values)):
            is_fit = given.dim() == LENGTH_DIM + 2
            if not is_fit or (given.shape[0], given.shape[LENGTH_DIM]) != (rows, length):
                what = f"{name} must be [{rows}, heads, {length}, dim], got {list(given.shape)}"
                raise UsageError(what, where=CACHE_API)
        if id(self) not in found.memory:
            found.memory[id(self)] = (
                keys.new_zeros(rows, keys.shape[HEADS_DIM], found.places, keys.shape[-1]),
                values.new_zeros(rows, values.shape[HEADS_DIM], found.places, values.shape[-1]),
            )
        all_keys, all_values = found.memory[id(self)]
        for held, given in ((all_keys, keys), (all_values, values)):
            index = found.positions[:, None, :, None].expand(given.shape)
            held.scatter_(LENGTH_DIM, index, given)
        columns = torch.arange(found.places, device=keys.device)
        mask = columns <= found.positions.to(keys.device)[:, None, :, None]
        return all_keys, all_values, mask

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions of the tokens in their rows: ``[1, length]``, or of each row."""
        if self._rows is None:
            return torch.arange(length, device=device)[None]
        return self._rows.positions.to(device)


def find_caches(model: nn.Module) -> list[KVCache]:
    """Return the caches of a model."""
    return [module for module in model.modules() if isinstance(module, KVCache)]
