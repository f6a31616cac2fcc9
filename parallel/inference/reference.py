"""Compares a cut model with the full model in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pdrun.errors import ConfigError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import STAGE_AXIS
from pdrun.parallel.inference.decode import SessionFactory, generate_rows
from pdrun.parallel.inference.encoder_decoder import EncoderInputs
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
    axes: MeshGroups,
    session: SessionFactory,
    prompts: Prompts,
    places: int,
    tokens: Sequence[Sequence[int]],
    inputs: EncoderInputs,
) -> GenerationComparison:
    """
    Compare logits and tokens; all ranks call this together.

    Args:
        model: this rank's shards.
        original: the full model without memory.
        axes: this rank's groups.
        tokens: what the cut model generated, greedily, for all prompts.
        inputs: of the encoder.

    Raises:
        ConfigError: the difference is more than rounding.
    """
    names = axes.grid.names
    full = _gather_model(model, original, axes[tuple(name for name in names if name != "dp")])
    device = axes.device
    mine = session(model, prompts, places, device, inputs).start().float()
    stages = axes[STAGE_AXIS]
    mine = stages.broadcast(mine.contiguous(), stages.size - 1)
    wanted = session(full, prompts, places, device, inputs).start().float()
    scale = max(float(wanted.abs().max()), 1e-30)
    difference = float((mine - wanted).abs().max()) / scale
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    again = session(full, prompts, places, device, inputs)
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
    """Return the full model, with the weights of all ranks that have parts of it."""
    full = copy.deepcopy(original)
    shards = dict(model.named_parameters(remove_duplicate=False))
    dtype = next(iter(shards.values())).dtype
    found: dict[int, nn.Parameter] = {}
    for name, empty in list(full.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        if id(empty) not in found:
            found[id(empty)] = nn.Parameter(
                _gather_weight(shards.get(name), empty, dtype, axis), requires_grad=False
            )
        full.get_submodule(owner)._parameters[key] = found[id(empty)]
    return full


def _gather_weight(
    part: nn.Parameter | None, empty: nn.Parameter, dtype: torch.dtype, axis: AxisGroup
) -> torch.Tensor:
    """
    Return a full weight.

    Args:
        part: this rank's; None if it is of another stage.
        empty: the weight of the full model.
        dtype: of the weights; used for a ``part`` of another stage.
    """
    if axis.size == 1 and part is not None:
        return part.detach()
    # several ranks can have the same part: the sum is divided by their number
    held = torch.zeros(2, *empty.shape, dtype=dtype, device=axis.device)
    if part is not None:
        shard = shard_of(part)
        shard.put_into(part, held[0])
        shard.put_into(torch.ones_like(part), held[1])
    held = axis.all_reduce(held)
    return held[0] / held[1]
