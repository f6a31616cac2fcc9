"""
What a compiled module keeps for its backward pass, read from its graphs.

An eager module keeps what each operator saves. torch.compile traces forward and backward together
and keeps what its partition of that graph saves; the rest is computed again. On fake tensors the
module is replaced by a node that keeps tensors of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.model.forward_wrapper import COMPILED_MARK, Forward, wrap_forward


@dataclass(frozen=True)
class UnitGraphs:
    """
    The graphs of a compiled module.

    Attributes:
        outputs: (shape, dtype) of its results.
        form: the results' structure.
        kept: (number of elements, dtype) of what the forward keeps.
        kept_inputs: the inputs that it keeps, by position among inputs and weights.
    """

    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    form: Any
    kept: tuple[tuple[int, torch.dtype], ...]
    kept_inputs: tuple[int, ...]


def emulate_compiled(model: nn.Module, traced: Callable[[Callable[[], Any]], Any]) -> None:
    """
    Have the compiled modules of a model with fake weights keep what compiled code keeps.

    A module that cannot be traced runs as it is.

    Args:
        traced: calls a function whose tensors are not counted.
    """
    known: dict[Any, UnitGraphs | None] = {}
    for module in model.modules():
        if vars(module).get(COMPILED_MARK):
            wrap_forward(
                module,
                lambda forward, module=module: _emulate(  # type: ignore[misc]
                    module, forward, known, traced
                ),
            )


def _emulate(
    module: nn.Module,
    forward: Forward,
    known: dict[Any, UnitGraphs | None],
    traced: Callable[[Callable[[], Any]], Any],
) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [leaves[place] for place in places]
        params = dict(module.named_parameters())
        key = _describe_call(module, leaves, form)
        if key not in known:

            def call(*tensors: torch.Tensor) -> Any:
                """Compute the module with other tensors in the place of inputs and weights."""
                mine = list(leaves)
                for place, tensor in zip(places, tensors, strict=False):
                    mine[place] = tensor
                new = dict(zip(params, tensors[len(places) :], strict=True))
                again_args, again_kwargs = pytree.tree_unflatten(mine, form)
                with torch.nn.utils.stateless._reparametrize_module(module, new):
                    return forward(*again_args, **again_kwargs)

            known[key] = traced(lambda: trace_unit(call, inputs, [*params.values()]))
        graphs = known[key]
        if graphs is None:
            return forward(*args, **kwargs)
        results = _KeptByUnit.apply(graphs, *inputs, *params.values())
        return pytree.tree_unflatten(list(results), graphs.form)

    return run


def _describe_call(module: nn.Module, leaves: Sequence[Any], form: Any) -> Any:
    """Return a key that is equal for calls with equal graphs: of layers of one kind."""
    return (
        type(module),
        module.training,
        tuple(
            (name, tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in module.named_parameters()
        ),
        tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)[:99]
            for leaf in leaves
        ),
        str(form),
    )


def trace_unit(
    call: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> UnitGraphs | None:
    """
    Return the graphs of a function of fake tensors, as torch.compile would make them; None if it
    cannot be traced.

    Args:
        weights: its other arguments; they are in memory anyway, so keeping one costs nothing.
    """
    from unittest import mock

    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    forms: list[Any] = []

    def flat_call(*inner: torch.Tensor) -> list[torch.Tensor]:
        leaves, form = pytree.tree_flatten(call(*inner))
        forms.append(form)
        return list(leaves)

    try:
        # collectives are operators of the graph, as when it is compiled
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            joint = aot_export_joint_simple(
                flat_call,
                (*inputs, *weights),
                trace_joint=True,
                decompositions=select_decomp_table(),
            )
        count = forms[-1].num_leaves
        for node in list(joint.graph.nodes):  # compiled code has none; one keeps what it reads
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                joint.graph.erase_node(node)
        values = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
        forward, _ = min_cut_rematerialization_partition(
            joint,
            values,
            num_fwd_outputs=count,
            static_lifetime_input_indices=[*range(len(inputs), len(inputs) + len(weights))],
        )
    except Exception:
        return None  # an estimate of uncompiled code is better than none
    return _read_forward(forward, count, forms[-1], len(inputs) + len(weights))


def _read_forward(forward: Any, count: int, form: Any, input_count: int) -> UnitGraphs | None:
    """Read what a forward graph returns after its ``count`` results."""
    nodes = [node for node in forward.graph.nodes if node.op == "placeholder"]
    own = {
        node.meta["val"].untyped_storage()._cdata: place
        for place, node in enumerate(nodes[:input_count])
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    (returned,) = [node for node in forward.graph.nodes if node.op == "output"]
    values = [
        node.meta.get("val") if isinstance(node, torch.fx.Node) else node
        for node in returned.args[0]
    ]
    if not all(isinstance(value, torch.Tensor) for value in values[:count]):
        return None
    kept: dict[int, tuple[int, torch.dtype]] = {}
    kept_inputs = set()
    results = {value.untyped_storage()._cdata for value in values[:count]}
    for value in values[count:]:
        if not isinstance(value, torch.Tensor):
            continue
        storage = value.untyped_storage()
        if storage._cdata in own:
            kept_inputs.add(own[storage._cdata])
        elif storage._cdata not in results:
            kept[storage._cdata] = (storage.nbytes() // value.element_size(), value.dtype)
    return UnitGraphs(
        tuple((value.shape, value.dtype) for value in values[:count]),
        form,
        tuple(kept.values()),
        tuple(sorted(kept_inputs)),
    )


class _KeptByUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: UnitGraphs, *tensors: torch.Tensor) -> Any:
        first = tensors[0]
        kept = [first.new_empty(numel, dtype=dtype) for numel, dtype in graphs.kept]
        ctx.save_for_backward(*kept, *[tensors[place] for place in graphs.kept_inputs])
        ctx.like = [(tuple(x.shape), x.dtype, x.device) for x in tensors]
        return tuple(first.new_empty(shape, dtype=dtype) for shape, dtype in graphs.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        made = [
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(
                ctx.like, ctx.needs_input_grad[1:], strict=True
            )
        ]
        return (None, *made)
