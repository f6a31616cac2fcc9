"""Creation of tensors: each rank makes its shard. Counters are made in full, and sliced."""

from __future__ import annotations

from pdrun.parallel.operators.rules.labels import splits_by_labels
from pdrun.parallel.operators.rules.rule import (
    LocalCall,
    LocalContext,
    OperatorView,
    OpSplit,
    register_rule,
)


def _call_constant(context: LocalContext) -> LocalCall:
    """Replace the shape among the arguments by the local shape."""
    args = list(context.operator.args)
    position = 1 if context.operator.kind.startswith("new_") else 0
    args[position] = list(context.local_out_shape())
    return context.operator.target, tuple(args), context.operator.kwargs


@register_rule(
    "full", "ones", "zeros", "new_full", "new_ones", "new_zeros", local_call=_call_constant
)
def split_constant(view: OperatorView) -> list[OpSplit]:
    """Split any dim."""
    return splits_by_labels(
        view,
        [[None] * len(shape) for shape in view.in_shapes],
        [list(range(len(view.out_shapes[0])))],
    )


@register_rule("arange", "linspace", "scalar_tensor", "eye", "tril_indices", "triu_indices")
def replicate_counter(view: OperatorView) -> list[OpSplit]:
    """All ranks make the full tensor."""
    return []
