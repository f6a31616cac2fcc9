"""
One rule per kind of ATen operator. Importing this package registers all of them.

May import: operators/graph, layouts.
Start reading here: rule.py, then matrix.py.
"""

from pdrun.parallel.operators.rules import (
    attention,
    convolution,
    creation,
    indexing,
    losses,
    matrix,
    normalization,
    pointwise,
    recurrent,
    reduction,
    shapes,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "indexing",
    "losses",
    "matrix",
    "normalization",
    "pointwise",
    "recurrent",
    "reduction",
    "shapes",
]
