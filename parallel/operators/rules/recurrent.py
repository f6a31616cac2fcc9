"""Recurrent layers: each row of the batch is a sequence that one rank computes."""

from __future__ import annotations

from pdrun.parallel.operators.rules.labels import Labels, splits_by_labels
from pdrun.parallel.operators.rules.rule import OperatorView, OpSplit, register_rule

RECURRENT_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""No split has a shard of a weight: weights that are stored in shards are gathered."""


@register_rule(*RECURRENT_KINDS)
def split_recurrent(view: OperatorView) -> list[OpSplit]:
    """Split the rows of sequences and states, unless there is dropout between layers."""
    if len(view.in_shapes[0]) != 3:  # one sequence, or packed ones
        return []
    if (
        view.get_arg(5, "dropout")
        and view.get_arg(6, "train")
        and view.get_arg(4, "num_layers") > 1
    ):
        return []
    rows: Labels = [None, "b", None]
    sequences: Labels = ["b", None, None] if view.get_arg(8, "batch_first") else rows
    states = 2 if view.operator.kind == "lstm" else 1
    weights: list[Labels] = [[None] * len(shape) for shape in view.in_shapes[1 + states :]]
    return splits_by_labels(
        view, [sequences, *[rows] * states, *weights], [sequences, *[rows] * states]
    )
