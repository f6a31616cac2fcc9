"""A run's weights as one safetensors file, out and in."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import safetensors
from pdrun.parallel.model.weights import tied_names
from pdrun.parallel.zero import full_tensors as wholes

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState


def export_weights(state: RunState, path: Path) -> None:
    """Write whole weights and buffers; tied weights have the first of their names."""
    weights = {
        weight.name: (weight.dtype, weight.shape)
        for weight in wholes.full_weight_order(state.engine)
    }
    saved = set((state.original_model or state.model).state_dict())
    buffers = {name: buffer for name, buffer in full_buffers(state).items() if name in saved}
    shapes = {
        **weights,
        **{name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()},
    }
    for name, (dtype, _) in shapes.items():
        if dtype not in safetensors.DTYPE_NAMES:
            what = f"{name} has the type {str(dtype).removeprefix('torch.')}, which a safetensors file does not"
            raise UsageError(what, where="pdrun.Run.export", hint="run.save, or run.full_weights()")
    tensors = chain(wholes.iter_full_weights(state.engine), buffers.items())
    if state.context.is_main:
        safetensors.write_file(path, shapes, tensors)
        return
    for _ in tensors:  # gathered by all ranks
        pass


def load_weights(state: RunState, path: Path) -> None:
    """
    Read this rank's ranges of the weights, and the buffers; tied weights may have any of their
    names.

    Raises:
        ConfigError: the file lacks a weight, or one has another shape.
    """
    file = safetensors.SafetensorsFile(path)
    other = {
        name: group for group in tied_names(state.original_model or state.model) for name in group
    }
    state.engine.wait_idle()
    with torch.no_grad():
        for held in wholes.local_ranges(state.engine):
            plain = held.weight.name
            tile = held.tile
            name = next((name for name in other.get(plain, ()) if name in file.entries), plain)
            value = file.read_tensor(name)
            if tuple(value.shape) != tile.shape:
                raise ConfigError(
                    f"{name} is {tuple(value.shape)} there and {tile.shape} here", where=str(path)
                )
            value = value if tile.is_full else tile.take_from(value)
            held.part.copy_(value.reshape(-1)[held.start : held.stop].view(held.part.shape))
        for name, buffer in state.model.named_buffers():
            if name in state.persistent_buffers and name in file.entries:
                found = file.read_tensor(name)
                if found.shape != buffer.shape:
                    what = f"{name} is {tuple(found.shape)} there and {tuple(buffer.shape)} here"
                    raise ConfigError(what, where=str(path))
                buffer.copy_(found)
    state.engine.publish_weights()


def full_buffers(state: RunState) -> dict[str, torch.Tensor]:
    """
    Return the buffers of the whole model, those of other stages too; every rank must call this.
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
