"""
The operator graph: what a model computes, as frozen data.

It has what planning needs of a forward pass: operators in order, the tensors between them with
their whole shapes, and for each operator the line of the user's model that it comes from.
`pdrun.parallel.operators.graph.export` makes it of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor in the arguments of an operator: an index into `Graph.tensors`."""

    index: int


@dataclass(frozen=True)
class GraphTensor:
    """
    One tensor of the graph.

    Attributes:
        kind: "param", "buffer", "constant" (made while exporting), "input", or "op".
        name: of a weight in the model (the first of its names), of an input, or of the operator
            that makes it.
        grad: whether a gradient flows through it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class Operator:
    """
    One operator.

    Attributes:
        name: unique; the path of its module and its kind, as ``blocks.0.fc1.linear``.
        kind: the ATen operator's name, without its overload.
        target: what to call.
        args, kwargs: its arguments, with `Ref` in place of tensors.
        inputs: the tensors among them, in order (one that is used twice is there twice).
        outputs: the tensors that it makes.
        many: whether it returns a list or tuple.
        module: path of the innermost module.
        source: ``file:line`` in the user's model and the code there, where known.
        stage: of a pipeline that computes it; None where there is none, or where every stage that
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
        """Return an argument by place or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass
class OperatorGraph:
    """
    A model's forward pass.

    Attributes:
        results: the tensors (or plain values) that it returns, flat, and `structure`, how they were
            nested.
        inputs: the tensors among the flattened arguments of the call; None for what is no tensor.
        stages: of the pipeline; 0 where there is none.
        origins: the stage that makes a tensor, by its index; what is missing is there on every
            stage.
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
        """Return the whole shape of a tensor."""
        return self.tensors[index].shape

    def tensor_users(self) -> list[list[int]]:
        """Return for each tensor the operators that read it, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for place, operator in enumerate(self.operators):
            for index in dict.fromkeys(operator.inputs):
                found[index].append(place)
        return found

    def tensor_producers(self) -> dict[int, int]:
        """Return for each tensor that an operator makes, which."""
        return {
            index: place
            for place, operator in enumerate(self.operators)
            for index in operator.outputs
        }


def operator_kind(target: Any) -> str:
    """Return the name of an operator without library and overload."""
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet, "__name__", None) or getattr(target, "__name__", str(target))
    return str(name)


def iter_refs(*values: Any) -> Iterator[TensorRef]:
    """Return all references in some arguments, in order."""
    for value in values:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from iter_refs(*value)
        elif isinstance(value, dict):
            yield from iter_refs(*value.values())


def replace_refs(value: Any, take: Callable[[TensorRef], Any]) -> Any:
    """Return arguments with each reference replaced, in the order of `refs`."""
    if isinstance(value, TensorRef):
        return take(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace_refs(one, take) for one in value)
    if isinstance(value, dict):
        return {key: replace_refs(one, take) for key, one in value.items()}
    return value
