"""
A stage of a model of transformers: some of its layers, between those of other ranks along pp.

The model is used as it is, as a smaller one. It loops over its own layers, whose first one takes
what the stage before has computed. Stages without the embedding or the head have placeholders.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import STAGE_AXIS
from pdrun.parallel.inference.sampling import GENERATE
from pdrun.parallel.torch_compat import untraced

INFER_STAGES = "pdrun.infer, pp"


def take_stage(model: Any, axes: MeshGroups) -> None:
    """
    Reduce a model to this rank's layers, in place.

    Args:
        model: cut over the tensor axes already; weights may be on the meta device.
        axes: this rank's groups; all ranks along pp call this.

    Raises:
        UsageError: the model has no list of layers, or less of them than stages.
    """
    axis = axes[STAGE_AXIS]
    config: Any = getattr(model, "config", None)
    layers = _find_layers(model, config)
    count = len(layers)
    if count < axis.size:
        what = f"the model has {count} layers, less than {axis.size} stages"
        raise UsageError(what, where=INFER_STAGES, hint=f"use pp={count} at most")
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        what = "layers that depend on their number (scale_attn_by_inverse_layer_idx)"
        raise UsageError(f"{what} are not supported", where=INFER_STAGES, hint="use tp")
    low, high = (count * place // axis.size for place in (axis.index, axis.index + 1))
    own = list(layers.items())[low:high]
    layers.clear()
    layers.update(own)  # the names stay those of the full model
    _shorten_config(model, config, low, high)
    for number, (_, layer) in enumerate(own):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # its place in the cache of this stage
    before = axes.make_subgroup(STAGE_AXIS, (axis.index - 1, axis.index)) if axis.index else None
    after = None
    if axis.index + 1 < axis.size:
        after = axes.make_subgroup(STAGE_AXIS, (axis.index, axis.index + 1))
    if before is not None:
        dtype_of = own[0][1]
        embedding: nn.Module = model.get_input_embeddings()
        width = embedding.weight.shape[-1]
        width = getattr(config, "hidden_size", width)
        model.set_input_embeddings(_NoEmbedding(width, dtype_of))
        own[0][1].register_forward_pre_hook(_StageReceiver(before), with_kwargs=True)
    if after is not None:
        own[-1][1].register_forward_hook(_StageSender(after))
        head: Any = model.get_output_embeddings()
        vocabulary = getattr(config, "vocab_size", head.weight.shape[0])
        model.set_output_embeddings(_NoHead(vocabulary))


def _find_layers(model: nn.Module, config: Any) -> dict[str, nn.Module]:
    """Return the modules of the list of layers."""
    count = getattr(config, "num_hidden_layers", None)
    has_ends = all(
        callable(getattr(model, name, None))
        for name in ("set_input_embeddings", "get_output_embeddings", "set_output_embeddings")
    )
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not has_ends or len(found) != 1:
        raise UsageError(
            f"{type(model).__name__} has no list of layers that is known",
            where=INFER_STAGES,
            hint="pp needs a causal model of transformers; use tp or dp",
        )
    layers: dict[str, Any] = found[0]._modules
    return layers


def _shorten_config(model: nn.Module, config: Any, low: int, high: int) -> None:
    """Give the model its own configuration, with the layers of this stage."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = high - low
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        own.layer_types = list(kinds)[low:high]
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own


class _NoEmbedding(nn.Module):
    """Stands for the embedding on a later stage: its values are not used."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        super().__init__()
        self._width = width
        self._layer = (layer,)  # no child: its weights must not appear here

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the right shape."""
        dtype = next(self._layer[0].parameters()).dtype
        return torch.zeros(*ids.shape, self._width, dtype=dtype, device=ids.device)


class _NoHead(nn.Module):
    """Stands for the head on an earlier stage: tokens come from the last one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of zero."""
        return hidden.new_zeros(*hidden.shape[:-1], self._vocabulary)


class _StageReceiver:
    """Gives the first layer what the stage before has computed."""

    def __init__(self, pair: AxisGroup) -> None:
        self._pair = pair

    @untraced
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        hidden = args[0] if args else options["hidden_states"]
        received = self._pair.broadcast(torch.empty_like(hidden).contiguous(), 0)
        if args:
            return (received, *args[1:]), options
        return args, {**options, "hidden_states": received}


class _StageSender:
    """Sends what the last layer has computed to the next stage."""

    def __init__(self, pair: AxisGroup) -> None:
        self._pair = pair

    @untraced
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, torch.Tensor):
            what = f"a layer returns a {type(hidden).__name__}, not a tensor"
            raise UsageError(what, where=GENERATE)
        self._pair.broadcast(hidden.contiguous(), 0)
