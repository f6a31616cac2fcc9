"""
The operators of a plan as plain data, and back.

    {"emb.embedding": {"in": [["tp", null], [null, null]]},
     "layers.*.norm1.rms_norm": "replicated",
     "layers.*.down.linear": {"in": [[null, null, "tp"], [null, "tp"]]}}

A layout is a list with the axes of each dim: null, one name, or a list of names. With partial sums
it is ``{"dims": [...], "sums": ["tp"]}``. An operator in parts has ``"parts"`` beside, with their
number and the dim of each input: ``{"count": 2, "dims": [0, null]}``. Equal operators of several
layers are one glob. An exact name has priority over a glob. What an edited file leaves out follows
by propagation.
"""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pdrun.errors import ConfigError, UsageError, did_you_mean
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.choose_splits import SplitChooser, missing_rule_error
from pdrun.parallel.operators.compiler import tensor_grid
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph
from pdrun.parallel.operators.interleaving.splits import OPEN, choose_part_split
from pdrun.parallel.operators.plan import OperatorPlan, OperatorSharding, UserLayouts
from pdrun.parallel.operators.propagate import propagate_layouts
from pdrun.parallel.operators.rules.rule import list_splits, view_operator

REPLICATED_ENTRY = "replicated"
Entry = Any


# ---- writing ----------------------------------------------------------------


def describe_operators(plan: OperatorPlan) -> dict[str, Entry]:
    """Return the entries of all operators of a plan."""
    by_name = {
        operator.name: _describe_operator(plan, position)
        for position, operator in enumerate(plan.graph.operators)
    }
    return _join_layers(by_name)


def describe_stored(plan: OperatorPlan) -> dict[str, Entry]:
    """Return the layouts of weights that are stored in another one than their first use needs."""
    found = {}
    users = plan.graph.tensor_users()
    for index, layout in plan.weights.items():
        if not users[index]:
            continue
        first = users[index][0]
        slot = plan.graph.operators[first].inputs.index(index)
        needed = plan.shardings[first].input_layout(slot, len(layout.dims)).whole()
        if needed != layout:
            found[plan.graph.tensors[index].name] = describe_layout(layout)
    return found


def describe_layout(layout: L) -> Entry:
    """Return a layout as plain data."""
    dims = [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in layout.dims]
    if layout.sums:
        return {"dims": dims, "sums": list(layout.sums)}
    return dims


def _describe_operator(plan: OperatorPlan, position: int) -> Entry:
    graph, sharding = plan.graph, plan.shardings[position]
    operator = graph.operators[position]
    in_parts = plan.interleaved.get(position)
    if not sharding.splits and in_parts is None:
        return REPLICATED_ENTRY
    ins = [
        sharding.input_layout(slot, len(graph.shape_of(index)))
        for slot, index in enumerate(operator.inputs)
    ]
    entry: dict[str, Any] = {"in": [describe_layout(layout) for layout in ins]}
    if in_parts is not None:
        entry["parts"] = {"count": in_parts.parts, "dims": list(in_parts.split.in_states)}
    made = sharding.output_layout(0, len(graph.shape_of(operator.outputs[0])))
    splits = list_splits(view_operator(graph, operator)) or []
    for axis, split in sharding.splits.items():
        fitting = [one for one in splits if one.in_states == split.in_states]
        if axis in plan.grid.names and fitting[0].out_states != split.out_states:
            entry["out"] = describe_layout(made)  # the inputs alone are ambiguous
    out = plan.out_layouts.get(operator.outputs[0])
    if out is not None:
        entry["result"] = describe_layout(out)
    return entry


def _join_layers(by_name: dict[str, Entry]) -> dict[str, Entry]:
    """Return entries in which operators that differ in one number of their name are one glob."""
    groups: dict[str, list[str]] = {}
    for name in by_name:
        pattern = _layer_pattern(name)
        if pattern is not None:
            groups.setdefault(pattern, []).append(name)
    found: dict[str, Entry] = {}
    for name, entry in by_name.items():
        pattern = _layer_pattern(name)
        if pattern is None or len(groups[pattern]) < 2:
            found[name] = entry
            continue
        if pattern in found:
            continue
        matched = fnmatch.filter(by_name, pattern)
        if set(matched) != set(groups[pattern]):
            found[name] = entry
            continue
        counts = Counter(json.dumps(by_name[one]) for one in groups[pattern])
        common = counts.most_common(1)[0][0]
        found[pattern] = json.loads(common)
    for pattern, names in groups.items():
        for name in names:
            if pattern in found and by_name[name] != found[pattern]:
                found[name] = by_name[name]
    return found


def _layer_pattern(name: str) -> str | None:
    """Return a name with its first number replaced by ``*``; None if it has none."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join([*parts[:place], "*", *parts[place + 1 :]])
    return None


# ---- reading ----------------------------------------------------------------


def plan_from_entries(
    graph: OperatorGraph,
    mesh: Grid,
    entries: Mapping[str, Entry],
    stored: Mapping[str, Entry],
    where: str,
) -> OperatorPlan:
    """
    Return the plan of a graph from the entries of a file.

    Args:
        mesh: all axes.
        where: the file, for errors.

    Raises:
        ConfigError: the entries are those of another model, name the first operator that differs.
    """
    grid = tensor_grid(mesh)
    reader = _EntryReader(graph, grid, mesh, where)
    for name, entry in reader.match_names(entries).items():
        reader.apply_entry(name, entry)
    for name, entry in stored.items():
        reader.apply_stored(name, entry)
    return propagate_layouts(graph, grid, reader.layouts)


class _EntryReader:
    """Collects `UserLayouts` from the entries of a file."""

    def __init__(self, graph: OperatorGraph, grid: Grid, mesh: Grid, where: str) -> None:
        self.graph = graph
        self.grid = grid
        self.where = where
        self.layouts = UserLayouts()
        self.positions = {
            operator.name: position for position, operator in enumerate(graph.operators)
        }
        self._chooser = SplitChooser(graph, grid, mesh)

    def match_names(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the entry of each operator: that of its exact name, or of the last glob."""
        found: dict[str, Entry] = {}
        for pattern, entry in entries.items():
            if pattern in self.positions:
                continue
            names = fnmatch.filter(self.positions, pattern)
            if not names:
                raise self._other_model(pattern, entries)
            found |= dict.fromkeys(names, entry)
        return found | {name: entries[name] for name in entries if name in self.positions}

    def _other_model(self, pattern: str, entries: Mapping[str, Entry]) -> ConfigError:
        """Return the error for an entry that matches no operator."""
        missing = next(
            (
                name
                for name in self.positions
                if not any(fnmatch.fnmatchcase(name, other) for other in entries)
            ),
            None,
        )
        what = f"the plan is for another model: it has no operator {pattern}"
        if missing is not None:
            what += f", and its operator {missing} is not in the plan"
        hint = did_you_mean(pattern, self.positions)
        return ConfigError(what, where=self.where, hint=hint or "remove the entry, or plan again")

    def apply_entry(self, name: str, entry: Entry) -> None:
        """Configure one operator."""
        position = self.positions[name]
        operator = self.graph.operators[position]
        if entry == REPLICATED_ENTRY:
            self.layouts.replicated.add(position)
            self.layouts.shardings[position] = OperatorSharding({}, (), self.grid.names)
            return
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("in"), list)
            or set(entry) - {"in", "out", "result", "parts"}
        ):
            what = f'{name}: must be "{REPLICATED_ENTRY}" or have a list "in", got {entry!r}'
            raise ConfigError(what, where=self.where)
        if len(entry["in"]) != len(operator.inputs):
            what = (
                f"{name} has {len(operator.inputs)} inputs, and {len(entry['in'])} in the plan:"
                " it is for another model"
            )
            raise ConfigError(what, where=self.where, hint="plan again")
        splits = list_splits(view_operator(self.graph, operator))
        if splits is None:
            raise missing_rule_error(operator)
        layouts: list[L | None] = [
            None if value is None else self._read_layout(value, name, index)
            for value, index in zip(entry["in"], operator.inputs, strict=True)
        ]
        out = self._read_optional(entry, "out", operator)
        sharding = self._chooser.choose_by_layouts(operator, splits, layouts, out, name)
        self.layouts.shardings[position] = sharding
        self.layouts.entry_names[position] = name
        result = self._read_optional(entry, "result", operator)
        if result is not None:
            self.layouts.results[position] = result
        if "parts" in entry:
            self._apply_parts(position, entry["parts"], name)

    def _apply_parts(self, position: int, value: Any, name: str) -> None:
        """Configure an operator that runs in parts."""
        operator = self.graph.operators[position]
        if not (
            isinstance(value, dict)
            and set(value) == {"count", "dims"}
            and isinstance(value["count"], int)
            and value["count"] > 1
            and isinstance(value["dims"], list)
            and len(value["dims"]) == len(operator.inputs)
            and all(dim is None or isinstance(dim, int) for dim in value["dims"])
        ):
            what = f"{name}: parts must be a count above 1 and a dim per input, got {value!r}"
            hint = '{"count": 2, "dims": [0, null]}'
            raise ConfigError(what, where=self.where, hint=hint)
        self.layouts.interleaved[position] = choose_part_split(
            self.graph,
            operator,
            self.layouts.shardings[position],
            self.grid,
            value["count"],
            (*value["dims"], OPEN),
            name,
        )

    def apply_stored(self, name: str, entry: Entry) -> None:
        """Set the layout of a weight."""
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.kind == "param" and tensor.name == name:
                self.layouts.weights[index] = self._read_layout(entry, name, index)
                return
        raise ConfigError(f"the plan is for another model: no weight {name}", where=self.where)

    def _read_optional(self, entry: Entry, key: str, operator: Operator) -> L | None:
        if entry.get(key) is None:
            return None
        return self._read_layout(entry[key], operator.name, operator.outputs[0])

    def _read_layout(self, value: Entry, name: str, index: int) -> L:
        """Return the layout of a JSON value."""
        sums: Any = ()
        if isinstance(value, dict) and set(value) == {"dims", "sums"}:
            value, sums = value["dims"], tuple(value["sums"])
        if not isinstance(value, list):
            raise ConfigError(f"{name}: {value!r} is no layout", where=self.where)
        try:
            layout = L(*[tuple(d) if isinstance(d, list) else d for d in value], sums=sums)
            layout.check(self.grid, self.graph.shape_of(index))
        except UsageError as error:
            raise ConfigError(f"{name}: {error.what}", where=self.where, hint=error.hint) from None
        return layout
