"""
How one operator is cut: from the layouts or counts of its inputs to a split along each axis.

Layouts name axes, so each axis is looked up by itself. Counts name none: the axes are given to
them, outer axes to the dims named first.
"""

from __future__ import annotations

from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.graph.graph import Graph, Operator
from pdrun.parallel.operators.plan import Choice, states_of
from pdrun.parallel.operators.rules.rule import PARTIAL, WHOLE, Split

WHERE = "pdrun.Operators"
Counts = tuple[int, ...]


class SplitChooser:
    """
    Chooses the splits of the operators of one graph.

    Args:
        grid: the tensor axes.
        mesh: all axes.
    """

    def __init__(self, graph: Graph, grid: Grid, mesh: Grid) -> None:
        self.graph = graph
        self.grid = grid
        self.mesh = mesh

    def by_layouts(
        self,
        operator: Operator,
        splits: list[Split],
        layouts: list[L | None],
        out: L | None,
        said: str,
        by_weight: bool = False,
    ) -> Choice:
        """
        Return the choice for an operator whose inputs have these layouts.

        Args:
            layouts: of each input; None leaves it open.
            out: the layout that the first result should have, if one is known.
            said: name of the entry, for errors.
            by_weight: a weight's layout asks for it: axes that no weight names stay open.

        Raises:
            UsageError: no split fits the layouts along some axis.
        """
        found = {}
        for axis in self.grid.names:
            split = _matching(splits, axis, layouts, out)
            if split is None:
                raise self._refusal(operator, splits, axis, layouts, said)
            if not split.is_whole:
                found[axis] = split
        self._divides(operator, found, said)
        fixed = tuple(found) if by_weight else self.grid.names
        return Choice(found, _order(self.grid, [*layouts, out]), fixed)

    def _refusal(
        self, operator: Operator, splits: list[Split], axis: str, layouts: list[Any], said: str
    ) -> UsageError:
        told = "; ".join(describe(split) for split in splits)
        where = f" at {operator.source}" if operator.source else ""
        asked = ", ".join(str(layout) for layout in layouts)
        what = f"{said}: {_kind(operator)}{where} can't take ({asked}) along {axis}"
        return UsageError(what, where=WHERE, hint=f"along one axis its inputs may be {told}")

    def _divides(self, operator: Operator, found: dict[str, Split], said: str) -> None:
        for split in found.values():
            parts = self.grid.group_size(tuple(axis for axis, other in found.items() if other == split))
            if split.divides and split.divides % parts:
                what = f"{said}: {_kind(operator)} can be cut so into parts of {split.divides}, not into {parts}"
                raise UsageError(what, where=operator.source or WHERE)

    # ---- counts a dim -------------------------------------------------------

    def by_counts(
        self, operator: Operator, splits: list[Split], wanted: tuple[Any, ...], said: str
    ) -> Choice:
        """
        Give axes to counts: outer axes to the dims named first; axes that no count needs repeat the
        computation.
        """
        counts = []
        for at, one in enumerate(wanted):
            shape = self.graph.shape(operator.inputs[at])
            if one is not None and (not isinstance(one, tuple) or len(one) != len(shape)):
                what = f"{said}: input {at} of {_kind(operator)} is {list(shape)}, {one!r} has not a count for each dim"
                raise UsageError(what, where=WHERE)
            counts.append(one)
        data = self.mesh.degree("dp") if "dp" in self.mesh.names else 1
        for names in (self.grid.names, ("dp", *self.grid.names) if data > 1 else ()):
            found = self._assign(names, splits, counts, {})
            if found is not None and names:
                chosen = {axis: split for axis, split in found.items() if axis != "dp"}
                self._divides(operator, chosen, said)
                return Choice(chosen, self.grid.names, self.grid.names)
        told = "; ".join(describe(split) for split in splits)
        what = f"{said}: no way to cut {_kind(operator)} into {tuple(wanted)} on a mesh of ({self.mesh})"
        hint = f"a mesh has an axis for each count, as pdrun.mesh(x=2, y=4); along one axis its inputs may be {told}"
        raise UsageError(what, where=WHERE, hint=hint)

    def _assign(
        self,
        names: tuple[str, ...],
        splits: list[Split],
        counts: list[Counts | None],
        found: dict[str, Split],
    ) -> dict[str, Split] | None:
        """Return the first assignment of a split to each axis, by depth, that makes the counts."""
        if not names:
            return found if self._product(counts, found) == 0 else None
        axis, *rest = names
        for split in (*splits[1:], splits[0]):
            if PARTIAL in split.ins or (axis == "dp" and split.ins[0] != 0):
                continue
            if axis != "dp" and self.grid.degree(axis) == 1 and not split.is_whole:
                continue
            more = found if split.is_whole else {**found, axis: split}
            if self._product(counts, more) <= 0:
                result = self._assign(tuple(rest), splits, counts, more)
                if result is not None:
                    return result
        return None

    def _product(self, counts: list[Counts | None], found: dict[str, Split]) -> int:
        """
        Return 0 where the axes given so far make the counts, -1 where they may still do so, 1 where
        they can't.
        """
        short = False
        for at, wanted in enumerate(counts):
            for dim, count in enumerate(wanted or ()):
                have = self.mesh.group_size(
                    tuple(axis for axis, split in found.items() if split.ins[at] == dim)
                )
                if count % have:
                    return 1
                short |= have != count
        return -1 if short else 0


def _matching(
    splits: list[Split], axis: str, layouts: list[L | None], out: L | None
) -> Split | None:
    """
    Return the split along an axis that fits the layouts, best one whose result is what is wanted.
    """
    wanted = [None if layout is None else states_of(layout).get(axis) for layout in layouts]
    fitting = [
        split
        for split in splits
        if all(
            layout is None or split.ins[at] == state
            for at, (layout, state) in enumerate(zip(layouts, wanted, strict=True))
        )
    ]
    if out is not None:
        state = states_of(out).get(axis)
        for split in fitting:
            if split.outs[0] == state:
                return split
    return fitting[0] if fitting else None


def _order(grid: Grid, layouts: list[L | None]) -> tuple[str, ...]:
    """Return the axes, major first, as some layouts nest them; else as the grid does."""
    order = list(grid.names)
    for layout in layouts:
        for axes in layout.dims if layout is not None else ():
            if len(axes) > 1:
                places = sorted(order.index(axis) for axis in axes)
                for place, axis in zip(places, axes, strict=True):
                    order[place] = axis
    return tuple(order)


def _kind(operator: Operator) -> str:
    """Return the kind of an operator, with its name and stage in a pipeline."""
    if operator.stage is None:
        return operator.kind
    return f"{operator.kind} ({operator.told})"


def missing(operator: Operator) -> UsageError:
    """Return the error for an operator without a rule."""
    what = f"there is no rule for cutting {operator.kind} ({operator.told})"
    hint = (
        f'Operators({{..., "{operator.name}": pdrun.replicate()}}) computes it whole on every rank'
    )
    return UsageError(what, where=operator.source or WHERE, hint=hint)


def describe(split: Split) -> str:
    """Return a split as text: what is cut where."""
    names = {WHOLE: "whole", PARTIAL: "a sum"}
    ins = [names.get(state, f"cut on dim {state}") for state in split.ins]
    return f"({', '.join(ins)})"
