"""
Digests of tensors' values: they show a change that torch's version counters do not count, such as a
write through ``param.data``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_ELEMENTS = 1 << 20
SAMPLE_ELEMENTS = 1 << 13
"""First elements of a weight that are looked at between steps."""
_PLACES = torch.arange(1, SAMPLE_ELEMENTS + 1)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes."""


def digest_values(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for the bits of each tensor; it differs if a value or the order differs."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places = []
    with torch.no_grad():
        for tensor in tensors:
            there = sums.setdefault(tensor.device, [])
            places.append((tensor.device, len(there)))
            there.append(_sum_bits(tensor))
        found = {device: torch.stack(each).tolist() for device, each in sums.items()}
    return [found[device][place] for device, place in places]


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers, each multiplied by its place in a chunk."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not flat.numel():
        return total
    bits = flat.view(INTEGERS[flat.element_size()])
    if bits.numel() <= SAMPLE_ELEMENTS:  # one product, with numbers that are kept
        return (bits * _PLACES[: bits.numel()].to(bits.device)).sum()
    places = torch.arange(1, min(bits.numel(), CHUNK_ELEMENTS) + 1, device=tensor.device)
    for chunk in bits.split(CHUNK_ELEMENTS):
        total += (chunk * places[: chunk.numel()]).sum()
    return total
