"""Compares a cut model with the full model in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pdrun.errors import ConfigError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.inference.decode import SessionFactory, generate_rows
from pdrun.parallel.inference.prompts import Prompts
from pdrun.parallel.inference.sampling import Sampling
from pdrun.parallel.model.shards import shard_of

VERIFY = "pdrun.infer.verify"
FP32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 3e-2
"""Largest difference of logits relative to the largest one, in fp32 and in narrower types."""


@dataclass(frozen=True)
class GenerationComparison:
    """
    The cut model and the full one on the same prompts.

    Attributes:
        max_difference: of logits after the prompts, relative to the largest one.
        different_rows: prompts whose greedy tokens differ; in types narrower than fp32 rounding can
            change the order of nearly equal tokens.
    """

    max_difference: float
    different_rows: tuple[int, ...]


def compare_with_full(
    model: nn.Module,
    original: nn.Module,
    axis: AxisGroup,
    session: SessionFactory,
    prompts: Prompts,
    places: int,
    tokens: Sequence[Sequence[int]],
) -> GenerationComparison:
    """
    Compare logits and tokens; ranks along the tensor axes call this together.

    Args:
        model: this rank's shards.
        original: the full model without memory.
        tokens: what the cut model generated, greedily, for all prompts.

    Raises:
        ConfigError: the difference is more than rounding.
    """
    full = _gather_model(model, original, axis)
    device = axis.device
    mine = session(model, prompts, places, device).start().float()
    wanted = session(full, prompts, places, device).start().float()
    scale = max(float(wanted.abs().max()), 1e-30)
    difference = float((mine - wanted).abs().max()) / scale
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    again = session(full, prompts, places, device)
    count = max(map(len, tokens))
    made = generate_rows(again, prompts.rows, count, Sampling(), (), lambda x: x)
    different = tuple(
        row
        for row, (ours, theirs) in enumerate(zip(tokens, made.tokens, strict=True))
        if list(ours) != theirs
    )
    tolerance = LOW_PRECISION_TOLERANCE if narrow else FP32_TOLERANCE
    if not difference <= tolerance:
        raise ConfigError(
            f"logits differ from those of one process by {difference:.1e} of the largest, more than"
            f" {tolerance:.0e}",
            where=VERIFY,
            hint="the strategy does not match the model",
        )
    if different and not narrow:
        row = different[0]
        raise ConfigError(
            f"the greedy tokens of prompt {row} are {list(tokens[row])}, in one process"
            f" {made.tokens[row]}",
            where=VERIFY,
            hint="logits agree: two tokens are nearly equally likely, or caches differ",
        )
    return GenerationComparison(difference, different)


def _gather_model(model: nn.Module, original: nn.Module, axis: AxisGroup) -> nn.Module:
    """Return the full model, with the weights of all ranks along the tensor axes."""
    full = copy.deepcopy(original)
    shards = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, nn.Parameter] = {}
    for name, empty in list(full.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        part = shards[name]
        if id(empty) not in found:
            found[id(empty)] = nn.Parameter(_gather_weight(part, axis), requires_grad=False)
        full.get_submodule(owner)._parameters[key] = found[id(empty)]
    return full


def _gather_weight(part: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    shard = shard_of(part)
    if shard.is_full:
        return part.detach()
    # several ranks can have the same part: the sum is divided by their number
    held = part.new_zeros(2, *shard.shape)
    shard.put_into(part, held[0])
    shard.put_into(torch.ones_like(part), held[1])
    held = axis.all_reduce(held)
    return held[0] / held[1]
