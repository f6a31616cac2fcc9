"""From an exported program of torch to an operator graph."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.operators.graph.fold_layers import FoldError
from pdrun.parallel.operators.graph.graph import (
    GraphTensor,
    Operator,
    OperatorGraph,
    TensorRef,
    iter_refs,
    operator_kind,
    replace_refs,
)

OPERATOR_ENGINE = "operator engine"


class ExportReader:
    """Turns an exported program into an `OperatorGraph`."""

    def __init__(self, model: nn.Module, program: Any) -> None:
        self.program = program
        self.graph = OperatorGraph()
        self.found: dict[torch.fx.Node, Any] = {}
        self.name_counts: dict[str, int] = {}
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.first: dict[int, str] = {}
        for name, value in (*self.params.items(), *self.buffers.items()):
            self.first.setdefault(id(value), name)
        self.weight_indices: dict[str, int] = {}
        self.layer_marks: dict[str, list[tuple[int, list[TensorRef]]]] = {}
        """
        By path of the first of equal layers: the index of its first operator and what it takes,
        then the index after its last operator and what it returns.
        """

    def read_graph(self) -> OperatorGraph:
        """Return the graph."""
        from torch.export.graph_signature import InputKind, OutputKind

        kinds = {
            InputKind.PARAMETER: "param",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
            InputKind.USER_INPUT: "input",
        }
        signature = self.program.graph_signature
        for spec in signature.output_specs:
            if spec.kind != OutputKind.USER_OUTPUT:
                raise UsageError(
                    f"the model writes to {spec.target} in forward, which is not supported",
                    where=OPERATOR_ENGINE,
                    hint="batch statistics and caches have no rule: use evaluation mode, or a"
                    " strategy of module styles",
                )
        specs = iter(signature.input_specs)
        checks = _find_checks(self.program.graph)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node, next(specs), kinds)
            elif node.op == "call_function" and node not in checks:
                self._read_call(node)
            elif node.op == "output":
                self.graph.results = [
                    self._replace_nodes(value) for value in pytree.tree_leaves(node.args[0])
                ]
        self.graph.result_structure = self.program.call_spec.out_spec
        return self.graph

    def _add_tensor(self, tensor: GraphTensor) -> int:
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def _read_placeholder(self, node: torch.fx.Node, spec: Any, kinds: dict[Any, str]) -> None:
        if spec.kind not in kinds:
            raise UsageError(
                f"input {node.name} must be a tensor, weight or buffer", where=OPERATOR_ENGINE
            )
        kind = kinds[spec.kind]
        value = node.meta.get("val")
        if kind == "input" and not isinstance(value, torch.Tensor):
            self.graph.inputs.append(None)
            self.found[node] = value
            return
        name = node.name if kind == "input" else spec.target
        requires_grad = False
        if kind in ("param", "buffer"):
            tensor = self.params.get(name, self.buffers.get(name))
            name = self.first.get(id(tensor), name)
            if name in self.weight_indices:  # a weight with several names
                self.found[node] = TensorRef(self.weight_indices[name])
                return
            requires_grad = kind == "param" and bool(tensor is not None and tensor.requires_grad)
        assert value is not None
        index = self._add_tensor(
            GraphTensor(kind, name, tuple(value.shape), value.dtype, requires_grad)
        )
        if kind in ("param", "buffer"):
            self.weight_indices[name] = index
        elif kind == "constant":
            self.graph.constants[index] = self.program.constants[spec.target]
        else:
            self.graph.inputs.append(index)
        self.found[node] = TensorRef(index)

    def _replace_nodes(self, value: Any) -> Any:
        """Return a value of the exported graph with references in place of nodes."""
        if isinstance(value, torch.fx.Node):
            found = self.found[value]
            if isinstance(found, TensorRef):
                return TensorRef(found.index)  # each use is a separate object
            return found
        if isinstance(value, (list, tuple)):
            return type(value)(self._replace_nodes(item) for item in value)
        if isinstance(value, dict):
            return {key: self._replace_nodes(item) for key, item in value.items()}
        return value

    def _read_call(self, node: torch.fx.Node) -> None:
        target = node.target
        args = self._replace_nodes(tuple(node.args))
        kwargs = self._replace_nodes(dict(node.kwargs))
        if getattr(target, "__name__", "") == "getitem":
            self.found[node] = args[0][args[1]]
            return
        kind = operator_kind(target)
        if kind in _UNFILLED_KINDS:  # with any values, so with zeros
            target = _UNFILLED_KINDS[kind]
            kwargs.pop("memory_format", None)
            kind = operator_kind(target)
        if kind in _IDENTITY_KINDS:
            self.found[node] = args[0]
            return
        if target is torch.ops.pdrun.mark_layer.default:
            self.layer_marks.setdefault(args[1], []).append((len(self.graph.operators), args[0]))
            return
        if target is torch.ops.pdrun.repeat_layer.default:
            self.found[node] = self._repeat_layer(*args)
            return
        value = node.meta.get("val")
        module = _module_path(node)
        source = _source_line(node)
        returns_list = isinstance(value, (list, tuple))
        if not returns_list and not isinstance(value, torch.Tensor):
            raise UsageError(f"{kind} must return tensors", where=source or OPERATOR_ENGINE)
        values = list(value) if returns_list else [value]
        output_types = [(tuple(tensor.shape), tensor.dtype) for tensor in values]
        outputs = tuple(
            map(
                TensorRef,
                self._add_operator(
                    kind, target, args, kwargs, output_types, returns_list, module, source
                ),
            )
        )
        self.found[node] = outputs if returns_list else outputs[0]

    def _add_operator(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        output_types: list[tuple[tuple[int, ...], torch.dtype]],
        returns_list: bool,
        module: str,
        source: str,
    ) -> tuple[int, ...]:
        """
        Add an operator; return the tensors that it makes.

        Args:
            output_types: shape and dtype of each output.
        """
        inputs = tuple(ref.index for ref in iter_refs(args, kwargs))
        requires_grad = kind not in ("detach", "stop") and any(
            self.graph.tensors[index].requires_grad for index in inputs
        )
        name = self._unique_name(module, kind)
        outputs = tuple(
            self._add_tensor(
                GraphTensor("op", name, shape, dtype, requires_grad and dtype.is_floating_point)
            )
            for shape, dtype in output_types
        )
        self.graph.operators.append(
            Operator(
                name, kind, target, args, kwargs, inputs, outputs, returns_list, module, source
            )
        )
        return outputs

    def _repeat_layer(
        self, inputs: list[TensorRef], path: str, first: str
    ) -> tuple[TensorRef, ...]:
        """Insert the operators of an equal layer in place of this one; return its results."""
        (start, first_inputs), (end, first_results) = self.layer_marks[first]
        counterparts: dict[int, int] = {}
        for ref, given in zip(first_inputs, inputs, strict=True):
            if counterparts.setdefault(ref.index, given.index) != given.index:
                raise FoldError(f"{first} takes one tensor twice, {path} two")

        def counterpart(index: int) -> int:
            tensor = self.graph.tensors[index]
            if index in counterparts:
                return counterparts[index]
            if tensor.kind in ("op", "input"):
                raise FoldError(f"{first} takes {tensor.name}, which is not one of its arguments")
            if tensor.kind in ("param", "buffer") and tensor.name.startswith(f"{first}."):
                return self.weight_indices[path + tensor.name[len(first) :]]
            return index

        def replace_ref(ref: TensorRef) -> TensorRef:
            return TensorRef(counterpart(ref.index))

        for original in self.graph.operators[start:end]:
            output_types = [
                (self.graph.shape_of(index), self.graph.tensors[index].dtype)
                for index in original.outputs
            ]
            args = replace_refs(original.args, replace_ref)
            kwargs = replace_refs(original.kwargs, replace_ref)
            is_inside = original.module == first or original.module.startswith(f"{first}.")
            module = original.module
            if is_inside:
                module = path + module.removeprefix(first)
            outputs = self._add_operator(
                original.kind,
                original.target,
                args,
                kwargs,
                output_types,
                original.returns_list,
                module,
                original.source,
            )
            counterparts.update(zip(original.outputs, outputs, strict=True))
        return tuple(map(replace_ref, first_results))

    def _unique_name(self, module: str, kind: str) -> str:
        base = f"{module}.{kind}" if module else kind
        count = self.name_counts.get(base, 0)
        self.name_counts[base] = count + 1
        if count == 0:
            return base
        return f"{base}_{count}"


_CHECK_KINDS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range_for_size",
    "sym_size",
)
_UNFILLED_KINDS = {
    "empty": torch.ops.aten.zeros.default,
    "empty_like": torch.ops.aten.zeros_like.default,
    "new_empty": torch.ops.aten.new_zeros.default,
}
_IDENTITY_KINDS = ("lift_fresh_copy", "alias", "contiguous")


def _find_checks(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the checks of a graph and what only they use, such as a number of tokens."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function":
            kind = operator_kind(node.target)
            is_check = kind in _CHECK_KINDS or (kind == "item" and not node.users)
            if is_check or (node.users and found.issuperset(node.users)):
                found.add(node)
    return found


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for name, _ in stack.values():
        path = name
    return re.sub(r"@\d+$", "", str(path))


_FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+\n\s*([^\n]*)')


def _source_line(node: torch.fx.Node) -> str:
    """Return the innermost line of a node's stack trace that is not in torch."""
    frames = _FRAME_PATTERN.findall(node.meta.get("stack_trace") or "")
    frames_of_user = [
        frame for frame in frames if "/torch/" not in frame[0] and "eval_with_key" not in frame[0]
    ] or frames
    return (
        f"{frames_of_user[-1][0]}:{frames_of_user[-1][1]}: {frames_of_user[-1][2].strip()}"
        if frames_of_user
        else ""
    )
