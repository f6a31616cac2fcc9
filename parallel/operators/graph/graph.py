"""
The operator graph: the forward pass of a model as data.

It has what planning needs: operators in order, the tensors between them with their full shapes, and
the line of the user's model for each operator. `pdrun.parallel.operators.graph.export` makes it
from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class TensorRef:
    """A tensor in the arguments of an operator: an index into `OperatorGraph.tensors`."""

    index: int


@dataclass(frozen=True)
class GraphTensor:
    """
    One tensor of the graph.

    Attributes:
        kind: "param", "buffer", "constant" (made while exporting), "input", or "op".
        name: of a weight in the model (the first of its names), of an input, or of the operator
            that makes it.
        requires_grad: whether a gradient flows through it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class Operator:
    """
    One operator.

    Attributes:
        name: unique; the path of its module and its kind, such as ``blocks.0.fc1.linear``.
        kind: the ATen operator's name, without its overload.
        target: the function to call.
        args, kwargs: its arguments, with `TensorRef` in place of tensors.
        inputs: the tensors among them, in order; a tensor that is used twice is listed twice.
        outputs: the tensors that it makes.
        returns_list: whether it returns a list or tuple.
        module: path of the innermost module.
        source: ``file:line`` in the user's model and the code there, if known.
        stage: the pipeline stage that computes it; None without a pipeline, or if every stage that
            needs it does.
    """

    name: str
    kind: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    returns_list: bool = False
    module: str = ""
    source: str = ""
    stage: int | None = None

    @property
    def display_name(self) -> str:
        """The name, and the stage if there is one: for errors."""
        if self.stage is None:
            return self.name
        return f"{self.name} of stage {self.stage}"

    def get_arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass
class OperatorGraph:
    """
    A model's forward pass.

    Attributes:
        inputs: the tensors among the flattened arguments of the call; None for other values.
        results: the tensors (or plain values) that it returns, flat.
        result_structure: how the results were nested.
        stage_count: stages of the pipeline; 0 without one.
        tensor_stages: the stage that makes a tensor, by its index; tensors that every stage has are
            missing.
    """

    tensors: list[GraphTensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    inputs: list[int | None] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result_structure: Any = None
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    stage_count: int = 0
    tensor_stages: dict[int, int] = field(default_factory=dict)

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self.tensors[index].shape

    def tensor_users(self) -> list[list[int]]:
        """Return for each tensor the operators that read it, in order."""
        users: list[list[int]] = [[] for _ in self.tensors]
        for position, operator in enumerate(self.operators):
            for index in dict.fromkeys(operator.inputs):
                users[index].append(position)
        return users

    def tensor_producers(self) -> dict[int, int]:
        """Return the operator that makes each tensor."""
        return {
            index: position
            for position, operator in enumerate(self.operators)
            for index in operator.outputs
        }


def operator_kind(target: Any) -> str:
    """Return the name of an operator without library and overload."""
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet, "__name__", None) or getattr(target, "__name__", str(target))
    return str(name)


def iter_refs(*values: Any) -> Iterator[TensorRef]:
    """Yield all references in some arguments, in order."""
    for value in values:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from iter_refs(*value)
        elif isinstance(value, dict):
            yield from iter_refs(*value.values())


def replace_refs(value: Any, take: Callable[[TensorRef], Any]) -> Any:
    """Return arguments with each reference replaced, in the order of `iter_refs`."""
    if isinstance(value, TensorRef):
        return take(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace_refs(item, take) for item in value)
    if isinstance(value, dict):
        return {key: replace_refs(item, take) for key, item in value.items()}
    return value
