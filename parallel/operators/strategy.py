"""
The entries of `pdrun.Operators`: operators and weights by name, as layouts or as counts per dim.

    pdrun.Operators({
        # the module's operator: shards of each input, dim by dim
        "blocks.*.attn.q": ((2, 1, 1), (4, 1)),
        # a weight
        "blocks.*.mlp.up.weight": L("tp", None),
        # an operator by its name, its inputs by layouts
        "attend.softmax": (L(None, "tp", None, None),),
        # the result: partial sums are reduce-scattered
        "blocks.*.mlp.down": OpLayout(out=L(None, "tp", None)),
        # computed in full on every rank, as operators without a rule are
        "strange.op": replicate(),
    })

Names are those of modules, parameters and operators (``MODULE.kind``). Globs are allowed.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout
from pdrun.parallel.layouts.finer_grid import FinerGrid
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.matmul_grid import match_matmul_grid
from pdrun.parallel.operators.choose_splits import (
    OPERATORS_API,
    DimCounts,
    SplitChooser,
    missing_rule_error,
)
from pdrun.parallel.operators.graph.constraints import LayoutSpec, decode_layout, is_layout
from pdrun.parallel.operators.graph.graph import OperatorGraph
from pdrun.parallel.operators.interleaving.splits import (
    choose_part_split,
    refuse_parts,
    take_parts,
)
from pdrun.parallel.operators.plan import OperatorSharding, UserLayouts
from pdrun.parallel.operators.rules.recurrent import RECURRENT_KINDS
from pdrun.parallel.operators.rules.rule import list_splits, view_operator
from pdrun.parallel.tensor.sequence_parallel import ReplicateStyle


@dataclass(frozen=True)
class OpLayout:
    """
    The layouts of one operator.

    Attributes:
        in_: per tensor input a layout, counts per dim, or None to leave it open; missing ones are
            open.
        out: the layout of its first result; None: the one that the operator produces.
    """

    in_: tuple[LayoutSpec | None, ...] = ()
    out: LayoutSpec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.in_, tuple) or not (self.out is None or is_layout(self.out)):
            raise UsageError(
                f"in_ must be a tuple with an entry per input, and out a layout, got {self}",
                where=OPERATORS_API,
                hint='OpLayout(in_=(L("dp", "tp"), None), out=L("dp", None))',
            )


Cut = OpLayout
"""The former name of `OpLayout`; it will be removed in 0.2."""
StrategyEntry = OpLayout | L | DeviceMatrixLayout | tuple[Any, ...] | ReplicateStyle


def resolve_entries(
    graph: OperatorGraph,
    grid: Grid,
    mesh: Grid,
    entries: Mapping[str, StrategyEntry],
    weight_layouts: Mapping[str, LayoutSpec],
    finer: FinerGrid | None = None,
    inputs: Mapping[int, LayoutSpec] | None = None,
) -> UserLayouts:
    """
    Apply the entries of a strategy and the constraints inside a model to a graph.

    Args:
        grid: the tensor axes.
        mesh: all axes.
        weight_layouts: layouts of weights that `shard` set, by name.
        finer: how the axes that the user named have been split.
        inputs: layouts of arguments, by position among their leaves.

    Raises:
        UsageError: a name matches nothing, an operator cannot have a layout, or a weight has two
            layouts.
    """
    resolver = _EntryResolver(graph, SplitChooser(graph, grid, mesh, finer))
    for name, layout in weight_layouts.items():
        resolver.set_weight(name, layout, f"pdrun.shard of {name}")
    for pattern, entry in entries.items():
        resolver.apply_entry(pattern, entry)
    resolver.apply_constraints()
    for argument, layout in (inputs or {}).items():
        resolver.set_input(argument, layout)
    resolver.follow_weights()
    return resolver.layouts


class _EntryResolver:
    """Collects `UserLayouts` for one graph."""

    def __init__(self, graph: OperatorGraph, chooser: SplitChooser) -> None:
        self.graph = graph
        self.grid = chooser.grid
        self.layouts = UserLayouts()
        self.stored_weights: set[int] = set()
        """Weights that an operator gathers before it uses them."""
        self.chooser = chooser
        self.params = {
            tensor.name: index
            for index, tensor in enumerate(graph.tensors)
            if tensor.kind == "param"
        }
        self.operators = {
            operator.name: position for position, operator in enumerate(graph.operators)
        }
        self.modules: dict[str, list[int]] = {}
        for position, operator in enumerate(graph.operators):
            if operator.module:
                self.modules.setdefault(operator.module, []).append(position)

    # ---- names --------------------------------------------------------------

    def apply_entry(self, pattern: str, entry: StrategyEntry) -> None:
        """Apply one entry to everything that its name matches."""
        for kind, known in (
            ("param", self.params),
            ("operator", self.operators),
            ("module", self.modules),
        ):
            names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
            if names and (kind == "param") == is_layout(entry):
                for name in names:
                    self._apply_to_name(kind, name, entry)
                return
        if is_layout(entry) and any(
            fnmatch.fnmatchcase(name, pattern) for name in (*self.operators, *self.modules)
        ):
            what = f"{pattern} is an operator: {entry!r} does not describe its inputs"
            hint = (
                "give a tuple with one entry per input, such as ((2, 4),), or"
                " OpLayout(in_=..., out=...)"
            )
            raise UsageError(what, where=OPERATORS_API, hint=hint)
        if any(fnmatch.fnmatchcase(name, pattern) for name in self.params):
            what = f"{pattern} is a weight: its entry must be a layout, got {entry!r}"
            raise UsageError(what, where=OPERATORS_API, hint='for example L("tp", None)')
        all_names = [*self.modules, *self.params, *self.operators]
        close = difflib.get_close_matches(pattern, all_names, n=1)
        what = f"{pattern!r} matches no module, weight or operator of the model"
        hint = f"the model has, for example, {', '.join(all_names[:4])}"
        if close:
            hint = f"did you mean {close[0]!r}?"
        raise UsageError(what, where=OPERATORS_API, hint=hint)

    def _apply_to_name(self, kind: str, name: str, entry: Any) -> None:
        """Apply an entry to one weight, operator or module."""
        if kind == "param":
            self.set_weight(name, entry, name)
            return
        position = self.operators[name] if kind == "operator" else self._main_operator(name)
        self.set_operator(position, entry, name)

    def _main_operator(self, module: str) -> int:
        """Return the operator of a module: the only one, or the first with a weight."""
        positions = self.modules[module]
        weighted = [
            position
            for position in positions
            if any(
                self.graph.tensors[index].kind == "param"
                for index in self.graph.operators[position].inputs
            )
        ]
        if len(positions) == 1 or weighted:
            return (weighted or positions)[0]
        names = ", ".join(self.graph.operators[position].name for position in positions)
        raise UsageError(
            f"{module} has {len(positions)} operators",
            where=OPERATORS_API,
            hint=f"name one of {names}",
        )

    # ---- weights ------------------------------------------------------------

    def set_weight(self, name: str, given: LayoutSpec, entry_name: str) -> None:
        """Set the layout of a weight."""
        refuse_parts(given, entry_name)
        index = self.params.get(name)
        if index is None:
            raise UsageError(f"no operator uses the weight {name}", where=OPERATORS_API)
        layout = self.chooser.drop_data_axes(
            self.chooser.to_mesh_axes(given, name, has_batch=False),
            self.graph.shape_of(index),
            name,
            has_batch=False,
        )
        if layout.sums:
            raise UsageError(
                f"{name}: a weight cannot be a partial sum, got {layout}", where=OPERATORS_API
            )
        old = self.layouts.weights.setdefault(index, layout)
        if old != layout:
            first = self.layouts.entry_names.get(-1 - index, name)
            raise UsageError(
                f"{name} has two layouts: {old} for {first}, {layout} for {entry_name}",
                where=OPERATORS_API,
            )
        self.layouts.entry_names.setdefault(-1 - index, entry_name)

    def follow_weights(self) -> None:
        """
        Configure the operators of configured weights, and the weights of configured operators.
        """
        for position, sharding in self.layouts.shardings.items():
            operator = self.graph.operators[position]
            for input_position, index in enumerate(operator.inputs):
                if self.graph.tensors[index].kind == "param" and index not in self.stored_weights:
                    layout = sharding.input_layout(input_position, len(self.graph.shape_of(index)))
                    self.set_weight(
                        self.graph.tensors[index].name,
                        layout,
                        self.layouts.entry_names.get(position, operator.name),
                    )
        for position, operator in enumerate(self.graph.operators):
            has_rule = list_splits(view_operator(self.graph, operator)) is not None
            if not has_rule or operator.kind in RECURRENT_KINDS:
                continue  # weights are gathered
            sharded = [
                index for index in operator.inputs if self.layouts.weights.get(index, L()).axes
            ]
            if (
                sharded
                and position not in self.layouts.shardings
                and position not in self.layouts.replicated
            ):
                wanted = tuple(
                    self.layouts.weights.get(index) if index in sharded else None
                    for index in operator.inputs
                )
                entry_name = self.layouts.entry_names.get(-1 - sharded[0], "")
                self.layouts.shardings[position] = self._choose_sharding(
                    position, wanted, None, entry_name, by_weight=True
                )

    # ---- operators ----------------------------------------------------------

    def set_operator(self, position: int, entry: StrategyEntry, entry_name: str) -> None:
        """Configure one operator."""
        if position in self.layouts.entry_names:
            name = self.graph.operators[position].display_name
            first = self.layouts.entry_names[position]
            raise UsageError(
                f"{name} is configured twice: by {first} and by {entry_name}", where=OPERATORS_API
            )
        self.layouts.entry_names[position] = entry_name
        if isinstance(entry, ReplicateStyle):
            self.layouts.replicated.add(position)
            self.layouts.shardings[position] = OperatorSharding({}, (), self.grid.names)
            return
        if not isinstance(entry, (OpLayout, tuple)):
            raise UsageError(
                f"{entry_name}: the entry of an operator must be a tuple or an OpLayout,"
                f" got {entry!r}",
                where=OPERATORS_API,
                hint="give a tuple with one entry per input, or OpLayout(in_=..., out=...)",
            )
        layout = entry if isinstance(entry, OpLayout) else OpLayout(tuple(entry))
        if len(layout.in_) > len(self.graph.operators[position].inputs):
            count = len(self.graph.operators[position].inputs)
            raise UsageError(
                f"{entry_name} has {count} inputs, but {len(layout.in_)} are given",
                where=OPERATORS_API,
            )
        for spec in layout.in_:
            if not (spec is None or is_layout(spec)) or (
                isinstance(spec, tuple) and not all(map(_is_count, spec))
            ):
                raise UsageError(
                    f"{entry_name}: an input must have a layout or a tuple of counts, got {spec!r}",
                    where=OPERATORS_API,
                    hint="the entry of an operator with one input is ((2, 4),), with a comma",
                )
        given, parts, part_dims = take_parts((*layout.in_, layout.out), entry_name)
        layout = OpLayout(given[:-1], given[-1])
        out = None
        if layout.out is not None:
            shape = self.graph.shape_of(self.graph.operators[position].outputs[0])
            out = self.chooser.drop_data_axes(
                self.chooser.to_mesh_axes(layout.out, entry_name), shape, entry_name
            )
            self.layouts.results[position] = out
        if layout.in_:
            wanted = tuple(
                self.chooser.to_mesh_axes(spec, entry_name)
                if isinstance(spec, (L, DeviceMatrixLayout))
                else spec
                for spec in layout.in_
            )
            if not self._set_matmul_grid(position, wanted, layout.out is not None, entry_name):
                self.layouts.shardings[position] = self._choose_sharding(
                    position, wanted, out, entry_name
                )
        if parts > 1:
            self.layouts.interleaved[position] = choose_part_split(
                self.graph,
                self.graph.operators[position],
                self.layouts.shardings.get(position, OperatorSharding()),
                self.grid,
                parts,
                part_dims,
                entry_name,
            )

    def _set_matmul_grid(
        self, position: int, wanted: tuple[Any, ...], has_out: bool, entry_name: str
    ) -> bool:
        """Configure a product over several axes; return whether the layouts are those of one."""
        operator = self.graph.operators[position]
        if operator.kind not in ("linear", "matmul", "mm") or len(wanted) < 2:
            return False
        weight = operator.inputs[1]
        if self.graph.tensors[weight].kind != "param" or not all(
            isinstance(spec, L) for spec in wanted[:2]
        ):
            return False
        is_transposed = operator.kind == "linear"
        given = [
            self.chooser.drop_data_axes(spec, self.graph.shape_of(index), entry_name)
            for spec, index in zip(wanted[:2], operator.inputs, strict=False)
        ]
        found = match_matmul_grid(given[0], given[1], is_transposed)
        if found is None:
            return False
        ndim = len(self.graph.shape_of(operator.inputs[0]))
        result = found.result(ndim)
        if has_out and self.layouts.results[position] != result:
            what = f"{entry_name}: the result of a product over {', '.join(given[1].axes)} is"
            raise UsageError(f"{what} {result}, got {self.layouts.results[position]}")
        self.set_weight(
            self.graph.tensors[weight].name, found.weight(is_transposed, True), entry_name
        )
        self.stored_weights.add(weight)
        needed = (found.operand(ndim), found.weight(is_transposed, False))
        self.layouts.results[position] = result
        self.layouts.shardings[position] = self._choose_sharding(position, needed, None, entry_name)
        return True

    def set_input(self, argument: int, given: LayoutSpec) -> None:
        """
        Configure the operators that read an argument and have no entry.

        An operator that cannot take the layout reads the argument in full, which all ranks have.
        """
        index = self.graph.inputs[argument]
        if index is None:
            return
        entry_name = f"dataset_strategy of argument {argument}"
        refuse_parts(given, entry_name)
        layout = self.chooser.drop_data_axes(
            self.chooser.to_mesh_axes(given, entry_name), self.graph.shape_of(index), entry_name
        )
        for position, operator in enumerate(self.graph.operators):
            if index not in operator.inputs or position in self.layouts.shardings:
                continue
            wanted = tuple(layout if one == index else None for one in operator.inputs)
            splits = list_splits(view_operator(self.graph, operator))
            try:
                if layout.axes and splits is not None:
                    self.layouts.shardings[position] = self._choose_sharding(
                        position, wanted, None, entry_name, by_weight=True
                    )
            except UsageError:
                continue

    def apply_constraints(self) -> None:
        """Configure the operators that `pdrun.constrain` left in the graph."""
        for position, operator in enumerate(self.graph.operators):
            if operator.kind == "constrain":
                entry_name = f"pdrun.constrain at {operator.source or operator.name}"
                decoded = decode_layout(operator.args[1])
                refuse_parts(decoded, entry_name)
                given = self.chooser.to_mesh_axes(decoded, entry_name)
                layout = self.chooser.drop_data_axes(
                    given, self.graph.shape_of(operator.inputs[0]), entry_name
                )
                self.layouts.shardings[position] = self._choose_sharding(
                    position, (layout,), None, entry_name
                )
                self.layouts.entry_names[position] = entry_name

    def _choose_sharding(
        self,
        position: int,
        wanted: tuple[L | DimCounts | None, ...],
        out: L | None,
        entry_name: str,
        by_weight: bool = False,
    ) -> OperatorSharding:
        """Choose the sharding of an operator from layouts or counts of its inputs."""
        operator = self.graph.operators[position]
        view = view_operator(self.graph, operator)
        splits = list_splits(view)
        if splits is None:
            raise missing_rule_error(operator)
        if any(isinstance(spec, tuple) for spec in wanted):
            return self.chooser.choose_by_counts(operator, splits, wanted, entry_name)
        layouts: list[L | None] = [None] * len(wanted)
        for input_position, spec in enumerate(wanted):
            if isinstance(spec, L):
                has_batch = self.graph.tensors[operator.inputs[input_position]].kind != "param"
                layouts[input_position] = self.chooser.drop_data_axes(
                    spec, view.in_shapes[input_position], entry_name, has_batch
                )
        return self.chooser.choose_by_layouts(operator, splits, layouts, out, entry_name, by_weight)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
