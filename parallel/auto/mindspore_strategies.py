"""
MindSpore's files of operator strategies (`save_operator_strategy_file`): read and written.

    {"parallel_strategy_item": {
        "Default/network-Net/fc1-Dense/MatMul-op0": {
            "stage": 0, "parallel_strategy": [[2, 1], [4, 1]]}},
     "parallel_layout_value_item": {
        "Default/network-Net/fc2-Dense/MatMul-op1": [{"dev_matrix": [2, 4],
         "alias_name": ["x", "y"], "tensor_map": [[1], [0]], "interleaved_parallel": false}, ...]}}

A name is the path of a cell and a primitive. It means the operator of the same kind in the module
with the same path; the n-th of several. Cells around the model, which MindSpore adds, and nodes of
the loss are passed over. Every other node must have a counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pdrun.errors import ConfigError
from pdrun.parallel.layouts.device_matrix import (
    DeviceMatrixLayout,
    from_tensor_map,
    to_tensor_map,
)
from pdrun.parallel.layouts.finer_grid import WantedCounts
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.view import VIRTUAL_AXIS
from pdrun.parallel.operators.compiler import plan_graph
from pdrun.parallel.operators.graph.constraints import LayoutSpec
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.strategy import OpLayout

COUNTS_KEY = "parallel_strategy_item"
OUT_COUNTS_KEY = "parallel_out_strategy_item"
LAYOUTS_KEY = "parallel_layout_value_item"
OUT_LAYOUTS_KEY = "parallel_out_layout_value_item"
KINDS: dict[str, tuple[str, ...]] = {
    "MatMul": ("linear", "matmul", "mm", "addmm"),
    "BatchMatMul": ("bmm", "baddbmm", "matmul"),
    "Add": ("add",),
    "BiasAdd": ("add",),
    "Sub": ("sub",),
    "Mul": ("mul",),
    "Div": ("div",),
    "RealDiv": ("div",),
    "ReLU": ("relu",),
    "GeLU": ("gelu",),
    "SiLU": ("silu",),
    "Sigmoid": ("sigmoid",),
    "Tanh": ("tanh",),
    "Softmax": ("softmax", "_softmax"),
    "LogSoftmax": ("log_softmax", "_log_softmax"),
    "LayerNorm": ("layer_norm", "native_layer_norm"),
    "RmsNorm": ("rms_norm", "_fused_rms_norm"),
    "Gather": ("embedding", "index_select"),
    "Dropout": ("dropout",),
    "Transpose": ("permute", "transpose", "t"),
    "ReduceSum": ("sum",),
    "ReduceMean": ("mean",),
    "Conv2D": ("conv2d",),
    "MaxPool": ("max_pool2d",),
    "AvgPool": ("avg_pool2d",),
    "FlashAttentionScore": ("scaled_dot_product_attention",),
    "Split": ("split", "split_with_sizes", "chunk"),
    "Concat": ("cat",),
    "Sqrt": ("sqrt",),
    "Rsqrt": ("rsqrt",),
    "Exp": ("exp",),
    "Pow": ("pow",),
    "Square": ("square",),
    "CumSum": ("cumsum",),
}
"""The ATen operators of a primitive."""
FOLLOWING = ("Reshape", "Cast", "Flatten", "ExpandDims", "Squeeze", "TupleGetItem", "Load", "Send")
"""Primitives whose layouts follow from their neighbours."""
LOSS_CELLS = re.compile(r"loss", re.IGNORECASE)
_PRIMITIVE = re.compile(r"(.+?)(?:-op[0-9]+)?$")


def is_operator_file(value: Any) -> bool:
    """Return whether a JSON value is a file of operator strategies."""
    if not isinstance(value, dict) or "parallel_layout_item" in value:
        return False
    return any(key in value for key in (COUNTS_KEY, LAYOUTS_KEY))


class MindSporeOperators(Operators):
    """
    The strategy of a file of operator strategies.

    Raises:
        ConfigError: a node has no strategy in a known form.
    """

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        super().__init__()
        self.where = where
        try:
            self.nodes = _read_nodes(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"is no file of operator strategies ({error!r})"
            raise ConfigError(what, where=where) from None

    def find_forms(self, model: Any) -> list[DeviceMatrixLayout | WantedCounts]:
        """Return the layouts of the file; see `Operators.find_forms`."""
        entries = {str(at): entry for at, entry in enumerate(self.nodes.values())}
        return [*Operators(entries).find_forms(model), *super().find_forms(model)]

    def plan_of(
        self, graph: OperatorGraph, mesh: Grid, inner: Mapping[str, LayoutSpec]
    ) -> OperatorPlan:
        """Return the plan of a graph; see `Operators.plan`."""
        entries = _match_nodes(graph, self.nodes, self.where)
        return plan_graph(
            graph,
            mesh,
            entries,
            inner,
            gather=self.gather,
            finer=self.finer,
            inputs=self.input_layouts,
        )


def _read_nodes(value: Mapping[str, Any]) -> dict[str, OpLayout]:
    """Return the entry of each node: layouts if it has some, otherwise counts."""
    ins: dict[str, tuple[LayoutSpec | None, ...]] = {}
    outs: dict[str, LayoutSpec] = {}
    for node, item in value.get(COUNTS_KEY, {}).items():
        ins[node] = tuple(_read_counts(one) for one in item["parallel_strategy"])
    for node, item in value.get(LAYOUTS_KEY, {}).items():
        ins[node] = tuple(map(_read_layout, _values_of(item)))
    for node, item in value.get(OUT_COUNTS_KEY, {}).items():
        first = _read_counts(item["parallel_strategy"][0])
        if first is not None:
            outs[node] = first
    for node, item in value.get(OUT_LAYOUTS_KEY, {}).items():
        outs[node] = _read_layout(_values_of(item)[0])
    return {node: OpLayout(ins.get(node, ()), outs.get(node)) for node in {**ins, **outs}}


def _values_of(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else list(item)


def _read_counts(value: list[int]) -> LayoutSpec | None:
    """Return counts; None for a scalar."""
    return tuple(int(count) for count in value) or None


def _read_layout(item: Mapping[str, Any]) -> DeviceMatrixLayout:
    names = tuple(str(name) for name in item["alias_name"])
    sizes = tuple(int(size) for size in item["dev_matrix"])
    layout = from_tensor_map(tuple(map(tuple, item["tensor_map"])), names)
    if names[-1:] == (VIRTUAL_AXIS,):
        return DeviceMatrixLayout(Grid(names[:-1], sizes[:-1]), layout, sizes[-1])
    if item.get("interleaved_parallel"):
        raise ValueError(f"the last axis must be {VIRTUAL_AXIS!r}, got {', '.join(names)}")
    return DeviceMatrixLayout(Grid(names, sizes), layout)


# ---- names ------------------------------------------------------------------


def _match_nodes(
    graph: OperatorGraph, nodes: Mapping[str, OpLayout], where: str
) -> dict[str, OpLayout]:
    """
    Return the entries by names of operators.

    Raises:
        ConfigError: a node has no counterpart.
    """
    modules = {operator.module for operator in graph.operators}
    paths = {path for module in modules for path in _prefixes(module)}
    found: dict[str, OpLayout] = {}
    for node in sorted(nodes, key=_node_order):
        *cells, last = [part for part in node.split("/") if part not in ("Default", "Gradients")]
        primitive = _match_primitive(last)
        if primitive in FOLLOWING or primitive.startswith("_Virtual"):
            continue
        names = [cell.rsplit("-", 1)[0] for cell in cells]
        module = next(
            (
                path
                for path in (".".join(names[at:]) for at in range(len(names) + 1))
                if path in paths
            ),
            "",
        )
        if not module and any(LOSS_CELLS.search(name) for name in names):
            continue
        kinds = KINDS.get(primitive, (_snake_case(primitive),))
        here = [one for one in graph.operators if one.module == module]
        fitting = [one for one in here if one.kind in kinds and one.name not in found]
        if fitting:
            found[fitting[0].name] = _fit_inputs(nodes[node], fitting[0])
        elif not (primitive == "BiasAdd" and any(one.kind in KINDS["MatMul"] for one in here)):
            have = ", ".join(one.name for one in here) or "no operator"
            what = f"the node {node} has no counterpart in the model"
            hint = f"{module or 'the model itself'} has {have}"
            raise ConfigError(what, where=where, hint=hint)
    return found


def _fit_inputs(entry: OpLayout, operator: Operator) -> OpLayout:
    """Return an entry without inputs that the operator lacks: plain numbers have no layout."""
    return OpLayout(entry.in_[: len(operator.inputs)], entry.out)


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:at]) for at in range(1, len(parts) + 1)]


def _match_primitive(name: str) -> str:
    found = _PRIMITIVE.match(name)
    return found[1] if found else name


def _node_order(node: str) -> tuple[str, int, str]:
    """Return a sort key: nodes of one primitive in the order of their numbers."""
    head, _, number = node.rpartition("-op")
    return head, int(number) if number.isdigit() else 0, node


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


# ---- writing ----------------------------------------------------------------


def write_operator_strategies(plan: OperatorPlan) -> dict[str, Any]:
    """
    Return the JSON value of a plan's operators: counts for readers, and layouts, which are exact.

    Operators that every rank computes in full have counts of 1.
    """
    names = plan.grid.names
    counts: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    out_layouts: dict[str, Any] = {}
    for number, operator in enumerate(plan.graph.operators):
        sharding = plan.shardings[number]
        node = _name_node(operator, number)
        ins = [
            sharding.input_layout(slot, len(plan.graph.shape_of(index))).whole()
            for slot, index in enumerate(operator.inputs)
        ]
        shards = [[plan.grid.group_size(axes) for axes in layout.dims] for layout in ins]
        counts[node] = {"stage": operator.stage or 0, "parallel_strategy": shards}
        in_parts = plan.interleaved.get(number)
        if not sharding.splits and in_parts is None:
            continue
        described = [_describe_layout(plan.grid, layout, names) for layout in ins]
        if in_parts is not None:
            described = [
                _add_parts(layout, in_parts.parts, dim)
                for layout, dim in zip(described, in_parts.split.in_states, strict=True)
            ]
        layouts[node] = described
        out = plan.out_layouts.get(operator.outputs[0])
        if out is not None:
            out_layouts[node] = [_describe_layout(plan.grid, out, names)]
    return {COUNTS_KEY: counts, LAYOUTS_KEY: layouts, OUT_LAYOUTS_KEY: out_layouts}


def _describe_layout(grid: Grid, layout: Any, names: tuple[str, ...]) -> dict[str, Any]:
    entries = to_tensor_map(layout, names)
    return {
        "dev_matrix": list(grid.sizes),
        "alias_name": list(names),
        "tensor_map": [[one] if isinstance(one, int) else list(one) for one in entries],
        "interleaved_parallel": False,
    }


def _add_parts(layout: dict[str, Any], parts: int, dim: int | None) -> dict[str, Any]:
    """Return a layout on the device matrix with MindSpore's axis of the parts, its last."""
    moved = [[one if one < 0 else one + 1 for one in axes] for axes in layout["tensor_map"]]
    if dim is not None:
        moved[dim] = [*(one for one in moved[dim] if one >= 0), 0]
    return {
        "dev_matrix": [*layout["dev_matrix"], parts],
        "alias_name": [*layout["alias_name"], VIRTUAL_AXIS],
        "tensor_map": moved,
        "interleaved_parallel": True,
    }


def _name_node(operator: Operator, number: int) -> str:
    """Return a node's name: the path of the module, and the first primitive of the kind."""
    primitive = next((name for name, kinds in KINDS.items() if operator.kind in kinds), None)
    cells = "".join(f"{part}-Cell/" for part in operator.module.split(".") if part)
    return f"Default/{cells}{primitive or _camel_case(operator.kind)}-op{number}"


def _camel_case(kind: str) -> str:
    return "".join(part.title() for part in kind.split("_"))
