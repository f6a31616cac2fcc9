"""
Which operators run in parts, and how: the split of each along the axis of the parts.

Parts are slices of a rank's own shard, so the axis of the parts is the innermost one of a dim. An
operator without an entry between two that run in parts does so too, if one of its splits fits.
"""

from __future__ import annotations

from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.view import VIRTUAL_AXIS
from pdrun.parallel.operators.graph.graph import Operator, OperatorGraph
from pdrun.parallel.operators.plan import (
    InterleavedSplit,
    OperatorPlan,
    OperatorSharding,
    UserLayouts,
)
from pdrun.parallel.operators.rules.recurrent import RECURRENT_KINDS
from pdrun.parallel.operators.rules.rule import PARTIAL, OpSplit, list_splits, view_operator
from pdrun.parallel.operators.stages import draws_mask

WHERE = "pdrun.Operators"
OPEN = "open"
"""Of an input without a layout: its parts follow from the other inputs."""


def take_parts(
    layouts: tuple[Any, ...], entry_name: str
) -> tuple[tuple[Any, ...], int, tuple[int | str | None, ...]]:
    """
    Return an entry's layouts without the axis of the parts, and where they had it.

    Args:
        layouts: of the inputs, then of the result; None: open.

    Returns:
        The layouts; the number of parts; for each layout the dim that is in parts, None for none,
        and `OPEN` where there is no layout.

    Raises:
        UsageError: two numbers of parts, or the axis in a layout that does not tell their number.
    """
    plain: list[Any] = []
    dims: list[int | str | None] = []
    counts = set()
    for layout in layouts:
        if not isinstance(layout, DeviceMatrixLayout):
            refuse_parts(layout, entry_name)
            plain.append(layout)
            dims.append(OPEN if layout is None else None)
            continue
        named = layout.layout
        dim = next((at for at, axes in enumerate(named.dims) if VIRTUAL_AXIS in axes), None)
        if layout.virtual == 1:
            dim = None
        if dim is not None:
            counts.add(layout.virtual)
        rest = [tuple(axis for axis in axes if axis != VIRTUAL_AXIS) for axes in named.dims]
        plain.append(DeviceMatrixLayout(layout.grid, L(*rest, sums=named.sums)))
        dims.append(dim)
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        what = f"{entry_name}: {VIRTUAL_AXIS!r} has {numbers} parts in one entry"
        raise UsageError(what, where=WHERE, hint="use one pdrun.Layout for all inputs")
    return tuple(plain), counts.pop() if counts else 1, tuple(dims)


def refuse_parts(layout: object, entry_name: str) -> None:
    """
    Refuse a layout in parts where there is no operator that could run in parts.

    Raises:
        UsageError: the layout has the axis of the parts.
    """
    named = layout.layout if isinstance(layout, DeviceMatrixLayout) else layout
    if isinstance(named, L) and VIRTUAL_AXIS in (*named.axes, *named.sums):
        what = f"{entry_name}: {VIRTUAL_AXIS!r} is for the inputs of an operator, by pdrun.Layout"
        hint = (
            'pdrun.Operators({"fc1": (layout(("dp", "interleaved_parallel"), "None"), ...)}), with'
            ' pdrun.Layout((2, 2), ("dp", "interleaved_parallel"))'
        )
        raise UsageError(what, where=WHERE, hint=hint)


def choose_part_split(
    graph: OperatorGraph,
    operator: Operator,
    sharding: OperatorSharding,
    grid: Grid,
    parts: int,
    dims: tuple[int | str | None, ...],
    entry_name: str,
) -> InterleavedSplit:
    """
    Return how an operator runs in parts.

    Args:
        sharding: of the operator over the ranks.
        dims: of the inputs, then of the result: see `take_parts`.

    Raises:
        UsageError: the operator cannot be split so, or a dim is not divisible.
    """
    *of_inputs, of_result = dims
    fitting = [
        split
        for split in list_splits(view_operator(graph, operator)) or []
        if not split.is_replicated
        and not split.takes_partial()
        and None not in split.out_states
        and all(dim in (OPEN, split.in_states[slot]) for slot, dim in enumerate(of_inputs))
        and (not isinstance(of_result, int) or split.out_states[0] == of_result)
        and any(isinstance(dim, int) for dim in of_inputs)
    ]
    if not fitting:
        given = ", ".join(
            f"dim {dim} in parts" if isinstance(dim, int) else dim or "full" for dim in of_inputs
        )
        what = f"{entry_name}: {operator.kind} cannot have inputs ({given}) along {VIRTUAL_AXIS!r}"
        hint = "choose a dim along which every part is computed separately, such as the rows"
        raise UsageError(what, where=operator.source or WHERE, hint=hint)
    if is_whole_only(operator):
        what = f"{entry_name}: {operator.kind} draws one mask for all parts of {VIRTUAL_AXIS!r}"
        hint = "leave its entry out; the operators before and after it can be in parts"
        raise UsageError(what, where=operator.source or WHERE, hint=hint)
    for split in fitting:
        if find_uneven(graph, operator, sharding, grid, split, parts) is None:
            return InterleavedSplit(parts, split)
    uneven = find_uneven(graph, operator, sharding, grid, fitting[0], parts)
    what = f"{entry_name}: {uneven}: it cannot be in {parts} parts of {VIRTUAL_AXIS!r}"
    raise UsageError(what, where=operator.source or WHERE, hint="parts must be equal")


def find_uneven(
    graph: OperatorGraph,
    operator: Operator,
    sharding: OperatorSharding,
    grid: Grid,
    split: OpSplit,
    parts: int,
) -> str | None:
    """Return the first dim whose shards have no equal parts, as text; None if all have."""
    for names, states, tensors in (
        ("input", split.in_states, operator.inputs),
        ("result", split.out_states, operator.outputs),
    ):
        for slot, (state, index) in enumerate(zip(states, tensors, strict=True)):
            if state is None or state == PARTIAL:
                continue
            axes = [
                axis
                for axis, other in sharding.splits.items()
                if (other.in_states if names == "input" else other.out_states)[slot] == state
            ]
            size = graph.shape_of(index)[state]
            shards = grid.group_size(tuple(axes))
            if size == 0 or size % (shards * parts):
                over = f" over {shards} ranks" if shards > 1 else ""
                return f"dim {state} of {names} {slot} of {operator.name} is {size}{over}"
    same = [axis for axis, other in sharding.splits.items() if other == split]
    if split.must_divide and split.must_divide % (parts * grid.group_size(tuple(same))):
        return f"the number of parts of {operator.name} must divide {split.must_divide}"
    return None


def is_whole_only(operator: Operator) -> bool:
    """Return whether an operator draws random numbers in a way that needs the full tensor."""
    if operator.kind == "dropout":
        return False  # its mask is drawn once, before the parts
    words = ("dropout", "rand", "bernoulli")
    return (
        draws_mask(operator)
        or operator.kind in RECURRENT_KINDS
        or any(word in operator.kind for word in words)
    )


def find_interleaved(plan: OperatorPlan, user: UserLayouts) -> dict[int, InterleavedSplit]:
    """Return how operators run in parts: those of the user, and those between them."""
    graph = plan.graph
    found: dict[int, InterleavedSplit] = {}
    for position, given in user.interleaved.items():
        operator, sharding = graph.operators[position], plan.shardings[position]
        if find_uneven(graph, operator, sharding, plan.grid, given.split, given.parts) is None:
            found[position] = given
    if not found:
        return found
    users = graph.tensor_users()
    leads_to = set(found)
    for position in reversed(range(len(graph.operators))):
        after = [one for index in graph.operators[position].outputs for one in users[index]]
        if leads_to.intersection(after):
            leads_to.add(position)
    made: dict[int, tuple[int, int]] = {}
    for position, operator in enumerate(graph.operators):
        if position in leads_to and position not in found:
            between = _split_between(plan, position, made)
            if between is not None:
                found[position] = between
        if position in found:
            parts, split = found[position].parts, found[position].split
            for index, state in zip(operator.outputs, split.out_states, strict=True):
                if state is not None and state != PARTIAL:
                    made[index] = (parts, state)
    return found


def _split_between(
    plan: OperatorPlan, position: int, made: dict[int, tuple[int, int]]
) -> InterleavedSplit | None:
    """Return how an operator without an entry takes inputs that are in parts; None if it cannot."""
    graph = plan.graph
    operator, sharding = graph.operators[position], plan.shardings[position]
    wanted = {slot: made[index] for slot, index in enumerate(operator.inputs) if index in made}
    if len({parts for parts, _ in wanted.values()}) != 1 or is_whole_only(operator):
        return None
    parts = next(iter(wanted.values()))[0]
    for split in list_splits(view_operator(graph, operator)) or []:
        if (
            not split.takes_partial()
            and all(split.in_states[slot] == dim for slot, (_, dim) in wanted.items())
            and not any(state is None or state == PARTIAL for state in split.out_states)
            and find_uneven(graph, operator, sharding, plan.grid, split, parts) is None
        ):
            return InterleavedSplit(parts, split)
    return None
