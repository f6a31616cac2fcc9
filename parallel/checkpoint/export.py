"""Exports a run's weights to one safetensors file, and loads them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import safetensors
from pdrun.parallel.model.weights import tied_names
from pdrun.parallel.zero import full_tensors

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState


def export_weights(state: RunState, path: Path) -> None:
    """Write full weights and buffers. Tied weights have the first of their names."""
    weights = {
        weight.name: (weight.dtype, weight.shape)
        for weight in full_tensors.full_weight_order(state.engine)
    }
    saved = set((state.original_model or state.model).state_dict(keep_vars=True))
    buffers = {name: buffer for name, buffer in full_buffers(state).items() if name in saved}
    shapes = {
        **weights,
        **{name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()},
    }
    for name, (dtype, _) in shapes.items():
        if dtype not in safetensors.DTYPE_NAMES:
            kind = str(dtype).removeprefix("torch.")
            what = f"{name} has the type {kind}, which safetensors files do not support"
            raise UsageError(
                what, where="pdrun.Run.export", hint="use run.save or run.full_weights()"
            )
    tensors = chain(full_tensors.iter_full_weights(state.engine), buffers.items())
    if state.context.is_main:
        safetensors.write_file(path, shapes, tensors)
        return
    for _ in tensors:  # gathered by all ranks
        pass


def load_weights(state: RunState, path: Path) -> None:
    """
    Read this rank's ranges of the weights, and the buffers. Tied weights may have any of their
    names.

    Raises:
        ConfigError: the file lacks a weight, or a weight has another shape.
    """
    file = safetensors.SafetensorsFile(path)
    other = {
        name: group for group in tied_names(state.original_model or state.model) for name in group
    }
    state.engine.wait_idle()
    with torch.no_grad():
        for local in full_tensors.local_ranges(state.engine):
            plain = local.weight.name
            shard = local.shard
            name = next((name for name in other.get(plain, ()) if name in file.entries), plain)
            value = file.read_tensor(name)
            if tuple(value.shape) != shard.shape:
                raise ConfigError(
                    f"{name} has shape {tuple(value.shape)}, {shard.shape} in this run",
                    where=str(path),
                )
            if not shard.is_full:
                value = shard.take_from(value)
            local.part.copy_(value.reshape(-1)[local.start : local.stop].view(local.part.shape))
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers and name in file.entries:
                found = file.read_tensor(name)
                if found.shape != buffer.shape:
                    here = tuple(buffer.shape)
                    raise ConfigError(
                        f"{name} has shape {tuple(found.shape)}, {here} in this run",
                        where=str(path),
                    )
                buffer.copy_(found)
    state.engine.publish_weights()


def full_buffers(state: RunState) -> dict[str, torch.Tensor]:
    """
    Return the buffers of the full model, also those of other stages; every rank must call this.
    """
    mine = dict(state.model.named_buffers())
    if state.original_model is None or state.mesh.pp == 1:
        return mine
    axis = state.axes["pp"]
    found = {}
    names = dict(state.original_model.named_buffers())
    flags = torch.tensor([[int(name in mine) for name in names]], device=state.device)
    holds = axis.all_gather(flags, 0)
    for place, (name, like) in enumerate(names.items()):
        stages = holds[:, place].nonzero().flatten().tolist()
        if stages:
            value = (mine[name].detach() if name in mine else torch.empty_like(like)).clone(
                memory_format=torch.contiguous_format
            )
            found[name] = axis.broadcast(value, stages[0])
    return found
