"""
The proof of every rule: the operator on shards, joined, equals the operator on full tensors.

For each example of each kind, and each split of its rule, the ranks along one axis (2 or 3, so that
shards are uneven, too) are simulated in one process:

1. Inputs are sharded, or replaced by terms of a sum.
2. Each rank computes what `rule.make_local_call` returns.
3. Results are joined or summed, and compared with the operator's results. The gradients of all
   inputs are compared as well.

All pairs of splits are checked on two axes, too.

    python -m pdrun.parallel.operators.rule_checker

prints a line per kind. Its exit code is 1 if a rule is wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.operators import rules as rules  # registers them
from pdrun.parallel.operators.choose_splits import describe_split
from pdrun.parallel.operators.graph.graph import Operator, TensorRef, replace_refs
from pdrun.parallel.operators.plan import OperatorSharding
from pdrun.parallel.operators.rules.examples import OperatorExample, all_examples
from pdrun.parallel.operators.rules.rule import (
    PARTIAL,
    RULES,
    LocalContext,
    OperatorView,
    OpSplit,
    State,
    list_splits,
    make_local_call,
)


@dataclass(frozen=True)
class RuleCase:
    """One example with one sharding."""

    example: OperatorExample
    grid: Grid
    sharding: OperatorSharding

    def __str__(self) -> str:
        splits = ", ".join(
            f"{axis}: {describe_split(split)}" for axis, split in self.sharding.splits.items()
        )
        shapes = [list(tensor.shape) for tensor in _example_tensors(self.example)]
        return f"{self.example.kind}{shapes} on ({self.grid}), {splits}"


def list_cases(example: OperatorExample) -> Iterator[RuleCase]:
    """
    Yield every sharding of an example: one axis of 2 and of 3, and every pair of splits on two axes
    of 2.
    """
    _, view = _view_example(example)
    splits = [split for split in list_splits(view) or [] if not split.is_replicated]
    for split, size in itertools.product(splits, (2, 3)):
        if not split.must_divide or split.must_divide % size == 0:
            yield RuleCase(example, Grid(("a",), (size,)), OperatorSharding({"a": split}, ("a",)))
    for first, second in itertools.combinations_with_replacement(splits, 2):
        if first != second or not first.must_divide or first.must_divide % 4 == 0:
            yield RuleCase(
                example,
                Grid(("a", "b"), (2, 2)),
                OperatorSharding({"a": first, "b": second}, ("a", "b")),
            )


def check_case(case: RuleCase) -> str:
    """Return what is wrong with a rule in one case; the empty string if nothing is."""
    try:
        return _compare_case(case)
    except (RuntimeError, TypeError, IndexError, AssertionError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _compare_case(case: RuleCase) -> str:
    """Simulate the ranks of a case and compare with the operator on full tensors."""
    operator, view = _view_example(case.example)
    leaves = [
        tensor.detach()
        .clone()
        .requires_grad_(tensor.is_floating_point() and position < case.example.grads)
        for position, tensor in enumerate(_example_tensors(case.example))
    ]
    torch.manual_seed(0)
    expected = _as_list(_call_target(operator.target, operator.args, operator.kwargs, leaves))
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in leaves]
    shards = [_shard_input(tensor, case, position) for position, tensor in enumerate(inputs)]
    results: list[list[torch.Tensor]] = []
    for rank in range(case.grid.size):
        target, args, kwargs = make_local_call(_local_context(operator, view, case, rank))
        torch.manual_seed(0)
        results.append(
            _as_list(_call_target(target, args, kwargs, [tensor[rank] for tensor in shards]))
        )
    for position, full in enumerate(expected):
        states = {axis: split.out_states[position] for axis, split in case.sharding.splits.items()}
        joined = _join_shards([tensor[position] for tensor in results], case, states)
        difference = _describe_difference(joined, full, f"result {position}")
        if difference:
            return difference
        expected[position], results[0][position] = full, joined
    return _compare_gradients(expected, results[0], leaves, inputs)


def _compare_gradients(
    expected: list[Any], found: list[Any], leaves: list[Any], inputs: list[Any]
) -> str:
    """Compare the gradients of all inputs."""
    result_pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a.requires_grad]
    if not result_pairs:
        return ""
    for a, b in result_pairs:
        if not b.requires_grad:
            return "a result lost its gradient"
        weight = torch.linspace(0.5, 1.5, a.numel(), dtype=a.dtype).view(a.shape)
        try:
            (a * weight).sum().backward(retain_graph=True)
        except RuntimeError:  # the operator itself has no derivative
            return ""
        (b * weight).sum().backward(retain_graph=True)
    for position, (a, b) in enumerate(zip(leaves, inputs, strict=True)):
        if a.grad is not None:
            found_grad = torch.zeros_like(b) if b.grad is None else b.grad
            difference = _describe_difference(found_grad, a.grad, f"gradient of input {position}")
            if difference:
                return difference
    return ""


def _describe_difference(found: torch.Tensor, wanted: torch.Tensor, what: str) -> str:
    if found.shape != wanted.shape:
        return f"{what} must be {list(wanted.shape)}, got {list(found.shape)}"
    found = found.detach()
    wanted = wanted.detach()
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 1e-9
    if torch.allclose(
        found.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        return ""
    return f"{what} differs by {float((found.double() - wanted.double()).abs().max()):.3g}"


def _view_example(example: OperatorExample) -> tuple[Operator, OperatorView]:
    """Return an example as an operator of a graph."""
    tensors = _example_tensors(example)
    count = itertools.count()
    new_ref = lambda _: TensorRef(next(count))  # noqa: E731
    args = _replace_tensors(example.args, new_ref)
    kwargs = _replace_tensors(example.kwargs, new_ref)
    torch.manual_seed(0)
    outs = _as_list(_call_target(example.target, args, kwargs, tensors))
    in_indices = tuple(range(len(tensors)))
    out_indices = tuple(range(len(tensors), len(tensors) + len(outs)))
    operator = Operator(
        example.kind,
        example.kind,
        example.target,
        args,
        kwargs,
        in_indices,
        out_indices,
        len(outs) > 1,
    )
    return operator, OperatorView(
        operator, tuple(tuple(x.shape) for x in tensors), tuple(tuple(x.shape) for x in outs)
    )


def _example_tensors(example: OperatorExample) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _replace_tensors((example.args, example.kwargs), found.append)
    return found


def _replace_tensors(value: Any, take: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return take(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replace_tensors(item, take) for item in value)
    if isinstance(value, dict):
        return {key: _replace_tensors(item, take) for key, item in value.items()}
    return value


def _call_target(target: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    def take(ref: TensorRef) -> torch.Tensor:
        return tensors[ref.index]

    return target(*replace_refs(args, take), **replace_refs(kwargs, take))


def _as_list(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return list(value)


def _local_context(
    operator: Operator, view: OperatorView, case: RuleCase, rank: int
) -> LocalContext:
    sharding = case.sharding
    coordinate = case.grid.coordinate(rank)
    ins = [
        sharding.input_layout(slot, len(shape)).box(case.grid, shape, rank)
        for slot, shape in enumerate(view.in_shapes)
    ]
    outs = [
        sharding.output_layout(slot, len(shape)).box(case.grid, shape, rank)
        for slot, shape in enumerate(view.out_shapes)
    ]
    sizes = {axis: case.grid.degree(axis) for axis in sharding.splits}
    return LocalContext(
        operator,
        sharding.splits,
        view.in_shapes,
        view.out_shapes,
        tuple(ins),
        tuple(outs),
        coordinate,
        sizes,
    )


_TERM_FACTORS = {2: (2.5, -1.5), 3: (2.5, -2.0, 0.5)}
"""The factors of the ranks' terms of a sum, of both signs. They add up to 1."""


def _shard_input(x: torch.Tensor, case: RuleCase, position: int) -> list[torch.Tensor]:
    """Return each rank's shard of an input. Terms of a sum differ."""
    layout = case.sharding.input_layout(position, x.dim())
    shards = []
    for rank in range(case.grid.size):
        factor = 1.0
        coordinate = case.grid.coordinate(rank)
        for axis in layout.sums:
            factor *= _TERM_FACTORS[case.grid.degree(axis)][coordinate[axis]]
        term = x * factor if layout.sums else x
        shards.append(
            term[
                tuple(slice(low, high) for low, high in layout.box(case.grid, tuple(x.shape), rank))
            ]
        )
    return shards


def _join_shards(
    shards: list[torch.Tensor], case: RuleCase, states: dict[str, State]
) -> torch.Tensor:
    """Return the full tensor of the ranks' shards, inner axes first."""
    for axis in reversed(case.grid.names):
        n = case.grid.degree(axis)
        groups = [shards[start : start + n] for start in range(0, len(shards), n)]
        shards = [_join_group(group, states.get(axis)) for group in groups]
    return shards[0]


def _join_group(group: list[torch.Tensor], state: State) -> torch.Tensor:
    if state == PARTIAL:
        return torch.stack(group).sum(0)
    if state is not None:
        return torch.cat(group, state)
    for copy in group[1:]:
        if not torch.allclose(copy.double(), group[0].double(), equal_nan=True):
            return copy * float("nan")
    if group[0].requires_grad:
        return torch.stack([copy / len(group) for copy in group]).sum(0)
    return group[0]


def main() -> int:
    """Print the result for each kind; return 1 if a rule is wrong."""
    failures: dict[str, list[str]] = {kind: [] for kind in RULES}
    counts = dict.fromkeys(RULES, 0)
    splits: dict[str, dict[OpSplit, None]] = {kind: {} for kind in RULES}
    for example in all_examples():
        for case in list_cases(example):
            counts[example.kind] += 1
            splits[example.kind].update(dict.fromkeys(case.sharding.splits.values()))
            failure = check_case(case)
            if failure:
                failures[example.kind].append(f"{case}: {failure}")
    for kind in sorted(RULES):
        verdict = "proven"
        if failures[kind]:
            verdict = "WRONG"
        elif not splits[kind]:
            verdict = "replicated only"
        print(f"{kind:40} {len(splits[kind]):3} splits {counts[kind]:5} cases  {verdict}")
        for line in failures[kind]:
            print(f"    {line}")
    wrong = sum(bool(lines) for lines in failures.values())
    print(f"{len(RULES)} kinds, {sum(counts.values())} cases, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
