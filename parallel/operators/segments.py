"""
Calls of submodules in a local graph.

Some features work on a submodule's forward: optimizer level 3 gathers a unit's weights around it,
recomputation repeats it. A local graph calls no submodules. So the part of the graph that is from
such a module becomes a separate graph, a segment, and the module is called with it. The module's
hooks run. Its forward, recomputed or not, takes its weights from the module and computes the
segment. A module that is called several times has several segments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pdrun.parallel.operators.graph.constraints import ModuleSharding

UNIT_KEY = "pdrun_unit"
"""Key of ``node.meta``: path of the module that is called, or the empty string."""


@dataclass(frozen=True)
class GraphSegment:
    """
    A segment of a local graph.

    Attributes:
        module: takes the weights, then the other tensors; returns a tuple.
        weight_names: relative to the called module.
    """

    module: fx.GraphModule
    weight_names: tuple[str, ...]


class SegmentedModule(nn.Module):
    """
    Base class that every submodule gets: if it is called with a `GraphSegment`, it computes the
    segment.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of the segment, or of the module."""
        if args and isinstance(args[0], GraphSegment):
            segment, *tensors = args
            return segment.module(
                *(get_tensor(self, name) for name in segment.weight_names), *tensors
            )
        return super().forward(*args, **kwargs)


class SegmentCall(nn.Module):
    """The call of a submodule in a local graph; the first argument is the model."""

    def __init__(self, path: str, segment: GraphSegment) -> None:
        super().__init__()
        self.path = path
        self.segment = segment

    def forward(self, model: nn.Module, *tensors: torch.Tensor) -> Any:
        """Return the tuple of the segment's results."""
        return model.get_submodule(self.path)(self.segment, *tensors)


def get_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """Return a weight or buffer by its path."""
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), key)
    return tensor


def derive_class(module: nn.Module, base: type[nn.Module]) -> None:
    """
    Give a module a class of the same name with ``base`` before the old class. The signature of
    ``forward`` stays.
    """
    kind = type(module)
    if (kind, base) not in _derived_classes:
        _derived_classes[kind, base] = _make_class(kind, base)
    module.__class__ = _derived_classes[kind, base]


_derived_classes: dict[tuple[type, type], type[nn.Module]] = {}
"""One class for all layers of a kind, so that torch.compile compiles them once."""


def _make_class(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(kind.forward)  # whose arguments say which keys of a batch it takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "forward": forward})


def accept_segments(model: nn.Module) -> None:
    """Make all submodules accept segments."""
    for module in model.modules():
        if module is not model and not isinstance(module, SegmentedModule):
            derive_class(module, SegmentedModule)


def find_called_modules(model: nn.Module) -> list[str]:
    """
    Return the paths of the submodules that must be called: the outermost with hooks or a replaced
    forward.
    """
    paths: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in paths)
        if name and not inside and ("forward" in module.__dict__ or _has_user_hooks(module)):
            paths.append(name)
    return paths


def _has_user_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks other than those of `shard`."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), ModuleSharding) for hook in hooks)


def find_unit(module: str, paths: list[str]) -> str:
    """Return the path that an operator's module is, or is inside; the empty string without one."""
    for path in paths:
        if module == path or module.startswith(f"{path}."):
            return path
    return ""


def extract_segments(
    root: nn.Module, graph: fx.Graph, names: list[str]
) -> tuple[fx.Graph, list[str]]:
    """
    Return a graph in which segments of equal `UNIT_KEY` are calls, and the names of its remaining
    weights.

    Args:
        root: has the modules and buffers of the graph, and gets the calls.
        graph: its first placeholders are the model and the weights by name.
    """
    return _Segmenter(root, graph, names).build_graph()


class _Segmenter:
    """Copies a graph and replaces its segments by calls."""

    def __init__(self, root: nn.Module, graph: fx.Graph, names: list[str]) -> None:
        self.root = root
        self.names = names
        self.nodes = list(graph.nodes)
        self.model, *weights = [node for node in self.nodes if node.op == "placeholder"][
            : len(names) + 1
        ]
        self.weights = dict(zip(weights, names, strict=True))
        self.main_graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.call_count = 0
        self.segment_graphs: dict[tuple[Any, ...], fx.GraphModule] = {}
        """
        The graphs of segments, by what they compute. Layers of a kind share one, and its compiled
        code.
        """

    def build_graph(self) -> tuple[fx.Graph, list[str]]:
        """Copy node by node, segment by segment."""
        start = 0
        while start < len(self.nodes):
            unit = self.nodes[start].meta.get(UNIT_KEY, "")
            end = start + 1
            while unit and end < len(self.nodes) and self.nodes[end].meta.get(UNIT_KEY, "") == unit:
                end += 1
            if unit:
                self._add_segment(unit, self.nodes[start:end])
            else:
                self.copies[self.nodes[start]] = self.main_graph.node_copy(
                    self.nodes[start], self.copies.__getitem__
                )
            start = end
        remaining = []
        for node, name in self.weights.items():
            if self.copies[node].users:
                remaining.append(name)
            else:
                self.main_graph.erase_node(self.copies[node])
        return self.main_graph, remaining

    def _add_segment(self, unit: str, nodes: list[fx.Node]) -> None:
        """Replace a segment by a call of its submodule."""
        segment_nodes = set(nodes)
        inputs = dict.fromkeys(
            node_in
            for node in nodes
            for node_in in node.all_input_nodes
            if node_in not in segment_nodes
        )
        own_weights = [
            node_in for node_in in inputs if self.weights.get(node_in, "").startswith(f"{unit}.")
        ]
        other_inputs = [node_in for node_in in inputs if node_in not in own_weights]
        results = [node for node in nodes if any(user not in segment_nodes for user in node.users)]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for position, node_in in enumerate((*own_weights, *other_inputs)):
            copies[node_in] = graph.placeholder(f"a_{position}")
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        names = tuple(self.weights[node_in][len(unit) + 1 :] for node_in in own_weights)
        name = f"call_{self.call_count}"
        self.call_count += 1
        key = self._graph_key(graph)
        if key not in self.segment_graphs:
            self.segment_graphs[key] = fx.GraphModule(self.root, graph, "Segment")
        segment = GraphSegment(self.segment_graphs[key], names)
        self.root.add_module(name, SegmentCall(unit, segment))
        result = self.main_graph.call_module(
            name, (self.copies[self.model], *(self.copies[node_in] for node_in in other_inputs))
        )
        for position, node in enumerate(results):
            self.copies[node] = self.main_graph.call_function(get_item, (result, position))

    def _graph_key(self, graph: fx.Graph) -> tuple[Any, ...]:
        """Return a key that is equal only for graphs that compute the same."""
        numbers = {node: f"%{position}" for position, node in enumerate(graph.nodes)}

        def target(node: fx.Node) -> Any:
            if node.op == "placeholder":
                return ""  # its name says nothing about what the graph computes
            if node.op != "call_module":
                return node.target
            module = self.root.get_submodule(str(node.target))
            return getattr(module, "compute_key", id(module))

        return tuple(
            (
                node.op,
                target(node),
                repr(fx.node.map_arg((node.args, node.kwargs), lambda one: numbers[one])),
            )
            for node in graph.nodes
        )


def get_item(values: Any, position: int) -> Any:
    """Return one of several results."""
    return values[position]
