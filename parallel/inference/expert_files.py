"""
Weights of experts that a file has one by one, and a model of transformers in one tensor.

    model.layers.0.mlp.experts.gate_up_proj [experts, 2 * hidden, dim]
        <- model.layers.0.mlp.experts.3.gate_proj.weight, .up_proj.weight
        or model.layers.0.block_sparse_moe.experts.3.w1.weight, .w3.weight
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch

from pdrun.parallel.inference.sources import WeightSource
from pdrun.parallel.model.shards import Shard, full_shard

FUSED_NAME = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
ROUTER_NAME = re.compile(r"(.*)\.mlp\.gate\.weight")
OLD_BLOCK = "block_sparse_moe"
PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Matrices that lie one below the other in a fused one, by the names in newer and older files."""


class SplitExpertsSource:
    """A source, and the fused weights that it has in parts."""

    def __init__(self, source: WeightSource, wanted: Collection[str]) -> None:
        """
        Find the parts.

        Args:
            source: has some of the wanted tensors under other names.
            wanted: names of the model's tensors.
        """
        self._source = source
        stored = set(source.names())
        self._parts: dict[str, list[tuple[str, ...]]] = {}
        """Name of a fused weight -> the names of each expert's matrices."""
        self._renamed: dict[str, str] = {}
        for name in wanted:
            if name in stored:
                continue
            if match := FUSED_NAME.fullmatch(name):
                experts = list(_find_experts(match[1], PARTS[match[2]], stored))
                if experts:
                    self._parts[name] = experts
            elif match := ROUTER_NAME.fullmatch(name):
                old = f"{match[1]}.{OLD_BLOCK}.gate.weight"
                if old in stored:
                    self._renamed[name] = old
        used = {part for experts in self._parts.values() for names in experts for part in names}
        used.update(self._renamed.values())
        self._names = (stored - used) | self._parts.keys() | self._renamed.keys()

    @property
    def place(self) -> str:
        """Name of the folder or file."""
        return self._source.place

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._names

    def file_of(self, name: str) -> str:
        """Return the file that has a tensor, or its first part."""
        if name in self._parts:
            return self._source.file_of(self._parts[name][0][0])
        return self._source.file_of(self._renamed.get(name, name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        if name not in self._parts:
            return self._source.shape_of(self._renamed.get(name, name))
        experts = self._parts[name]
        shapes = {self._source.shape_of(part) for names in experts for part in names}
        rows, *rest = shapes.pop() if len(shapes) == 1 else (0,)  # experts differ: no fused weight
        return len(experts), rows * len(experts[0]), *rest

    def read_shard(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a shard of a tensor, on the host; of fused weights, those of its experts."""
        if name not in self._parts:
            return self._source.read_shard(self._renamed.get(name, name), shard)
        first, *inner = shard.ranges
        chosen = [number for low, high in first for number in range(low, high)]
        out: torch.Tensor | None = None
        for place, number in enumerate(chosen):
            rows = [self._read_full(part) for part in self._parts[name][number]]
            one = torch.cat(rows)
            for dim, ranges in enumerate(inner):
                if ranges != ((0, one.shape[dim]),):
                    one = torch.cat([one.narrow(dim, low, high - low) for low, high in ranges], dim)
            if out is None:
                out = one.new_empty(len(chosen), *one.shape)
            out[place] = one
        assert out is not None  # each rank has an expert
        return out

    def _read_full(self, part: str) -> torch.Tensor:
        empty = torch.empty(self._source.shape_of(part), device="meta")
        return self._source.read_shard(part, full_shard(empty))


def _find_experts(
    layer: str, kinds: tuple[tuple[str, ...], ...], stored: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the names of the matrices of each expert of a layer, from expert 0 on."""
    for block in ("mlp", OLD_BLOCK):
        for parts in kinds:
            number = 0
            while True:
                names = tuple(f"{layer}.{block}.experts.{number}.{part}.weight" for part in parts)
                if not all(name in stored for name in names):
                    break
                yield names
                number += 1
