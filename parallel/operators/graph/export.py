"""
From a model to its operator graph: `export_graph` exports the forward pass on fake tensors.

Nothing is computed. Weights can be on the meta device.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.operators.graph.export_hooks import without_hooks
from pdrun.parallel.operators.graph.fold_layers import FoldError, fold_equal_layers
from pdrun.parallel.operators.graph.graph import OperatorGraph, operator_kind
from pdrun.parallel.operators.graph.read_export import OPERATOR_ENGINE, ExportReader
from pdrun.parallel.rng.dropout_functions import REPLACEMENTS


def export_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, fold: bool = True
) -> OperatorGraph:
    """
    Export the forward pass of a model.

    Args:
        args, kwargs: of the call; only shapes, types and values that are not tensors matter.
        fold: export equal layers once (`pdrun.parallel.operators.graph.fold_layers`); the graph is
            the same.

    Raises:
        UsageError: the model does not export.
    """
    if fold:
        # an error is raised by the second export, without folding
        with contextlib.suppress(Exception), fold_equal_layers(model) as folded:
            if folded:
                return _export_once(model, args, kwargs or {}, True)
    try:
        return _export_once(model, args, kwargs or {}, False)
    except UsageError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"{type(model).__name__} does not export: {reason}"
        hint = "remove control flow that depends on data, or use a strategy of module styles"
        if "Cache'> in output" in reason:
            hint = "use_cache=False in the batch: caches cannot be results"
        raise UsageError(
            what, where=_find_user_line(error) or OPERATOR_ENGINE, hint=hint
        ) from error


def _find_user_line(error: BaseException) -> str:
    """Return the innermost line of an error's traceback that is not in torch or pdrun."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parents[2])
    for frame in reversed(frames):
        if "/torch/" not in frame.filename and not frame.filename.startswith(own):
            if frame.filename.startswith("<"):
                continue
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _export_once(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folded: bool
) -> OperatorGraph:
    with (
        without_hooks(model),
        _unpatched_torch(),
        _without_graph_dump(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
        program = torch.export.export(model, args, kwargs, strict=False)
        if any(_has_effects(node) for node in program.graph.nodes):
            if folded:
                raise FoldError("the model writes in place, which folded layers would hide")
            _stop_gradients(program)
            program = program.run_decompositions({})
    return ExportReader(model, program).read_graph()


_TORCH_DROPOUTS = {name: getattr(functional, name) for name in REPLACEMENTS}


@contextmanager
def _unpatched_torch() -> Iterator[None]:
    """
    Export the model as written, also in the middle of a step: with torch's dropout, without
    autocast, with gradients.
    """
    patched = {name: getattr(functional, name) for name in _TORCH_DROPOUTS}
    for name, function in _TORCH_DROPOUTS.items():
        setattr(functional, name, function)
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"]
    if accelerator is not None:
        kinds.append(accelerator.type)
    try:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        for name, function in patched.items():
            setattr(functional, name, function)


@contextmanager
def _without_graph_dump() -> Iterator[None]:
    """
    Keep torch from printing the graph so far if a model does not export: the error says why.

    The model's own output stays.
    """
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    trace: Any = importlib.import_module("torch.export._trace")
    trace.print = lambda *args, **kwargs: None
    logger.addFilter(_is_no_remark)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_remark)
        del trace.print


def _is_no_remark(record: logging.LogRecord) -> bool:
    """Return False for torch's remark that the graph which it prints lacks a line of user code."""
    return not str(record.msg).startswith("Unable to find user code")


def _has_effects(node: torch.fx.Node) -> bool:
    """Return whether a node writes to its input, or contains a graph."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _stop_gradients(program: Any) -> None:
    """
    Mark the results of regions without gradients, before the regions are merged into the graph.
    """
    from pdrun.parallel.operators.graph import constraints as constraints  # registers the marks

    graph = program.graph
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or operator_kind(node.target) != "wrap_with_set_grad_enabled"
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
