"""
From a model to its operator graph: `trace` exports the forward pass on fake tensors.

Nothing is computed, and weights may be on the meta device.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.operators.graph.export_hooks import looked_at
from pdrun.parallel.operators.graph.fold_layers import Unlike, folding
from pdrun.parallel.operators.graph.graph import Graph, kind_of
from pdrun.parallel.operators.graph.read_export import WHERE, ExportReader
from pdrun.parallel.rng.dropout_functions import REPLACEMENTS


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, fold: bool = True
) -> Graph:
    """
    Export the forward pass of a model.

    Args:
        args, kwargs: what it is called with; only shapes, types and what is no tensor matter.
        fold: export equal layers once (`pdrun.parallel.operators.graph.fold_layers`); the graph is
            the same.

    Raises:
        UsageError: the model does not export.
    """
    if fold:
        with (
            contextlib.suppress(Exception),
            folding(model) as folded,
        ):  # what is wrong is said without folding
            if folded:
                return _exported(model, args, kwargs or {}, True)
    try:
        return _exported(model, args, kwargs or {}, False)
    except UsageError:
        raise
    except Exception as error:
        what = f"{type(model).__name__} does not export: {str(error).strip().splitlines()[0]}"
        hint = "control flow that depends on data has to go, or give a strategy of module styles instead"
        raise UsageError(what, where=WHERE, hint=hint) from error


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folded: bool
) -> Graph:
    with looked_at(model), _plain_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        program = torch.export.export(model, args, kwargs, strict=False)
        if any(_has_effects(node) for node in program.graph.nodes):
            if folded:
                raise Unlike(
                    "what is written in place can't be followed through a layer that isn't there"
                )
            _stop_gradients(program)
            program = program.run_decompositions({})
    return ExportReader(model, program).read()


_DROPOUTS = {name: getattr(functional, name) for name in REPLACEMENTS}


@contextmanager
def _plain_torch() -> Iterator[None]:
    """
    Export what the model says, in the middle of a step too: without its dropout, its autocast, its
    gradient mode.
    """
    placed = {name: getattr(functional, name) for name in _DROPOUTS}
    for name, function in _DROPOUTS.items():
        setattr(functional, name, function)
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        for name, function in placed.items():
            setattr(functional, name, function)


def _has_effects(node: torch.fx.Node) -> bool:
    """Whether a node writes into its input, or holds a graph of its own."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _stop_gradients(program: Any) -> None:
    """Mark what comes out of regions without gradients, before they are merged into the rest."""
    from pdrun.parallel.operators.graph import constraints as constraints  # registers the marks

    graph = program.graph
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or kind_of(node.target) != "wrap_with_set_grad_enabled"
            or node.args[0]
        ):
            continue
        for result in list(node.users):
            if (
                any(user.op == "output" for user in result.users)
                or not result.meta["val"].is_floating_point()
            ):
                continue
            with graph.inserting_after(result):
                stop = graph.call_function(torch.ops.pdrun.stop.default, (result,))
            stop.meta = {"val": result.meta["val"]}
            result.replace_all_uses_with(
                stop, delete_user_cb=lambda user, stop=stop: user is not stop
            )
    program.graph_module.recompile()
