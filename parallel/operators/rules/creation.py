"""
Tensors from nothing: each rank makes its part; counters are made whole, and parts of them taken.
"""

from __future__ import annotations

from pdrun.parallel.operators.rules.labels import by_labels
from pdrun.parallel.operators.rules.rule import Call, Place, Split, View, rule


def _run_new(place: Place) -> Call:
    """Replace the shape among the arguments."""
    args = list(place.operator.args)
    at = 1 if place.operator.kind.startswith("new_") else 0
    args[at] = list(place.out())
    return place.operator.target, tuple(args), place.operator.kwargs


@rule("full", "ones", "zeros", "new_full", "new_ones", "new_zeros", run=_run_new)
def constant(view: View) -> list[Split]:
    """Cut any dim."""
    return by_labels(
        view, [[None] * len(shape) for shape in view.ins], [list(range(len(view.outs[0])))]
    )


@rule("arange", "linspace", "scalar_tensor", "eye", "tril_indices", "triu_indices")
def counter(view: View) -> list[Split]:
    """All ranks make all of it."""
    return []
