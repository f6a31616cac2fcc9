"""
Tensor parallel by modules: styles for modules, and `Strategy`, which assigns styles by name.

For models that cannot be exported, or that are sharded module by module. Everything computes on
plain local tensors with explicit collectives.

May import: model, comm, rng, layouts.
Start reading here: strategy.py, then style.py.
"""

from pdrun.parallel.tensor.fused_loss.causal_models import fuse_head_loss as fuse_head_loss
from pdrun.parallel.tensor.fused_loss.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from pdrun.parallel.tensor.linear_2d_3d import linear2d as linear2d
from pdrun.parallel.tensor.linear_2d_3d import linear3d as linear3d
from pdrun.parallel.tensor.presets import strategy_for as strategy_for
from pdrun.parallel.tensor.strategy import Strategy as Strategy
from pdrun.parallel.tensor.styles import col as col
from pdrun.parallel.tensor.styles import heads as heads
from pdrun.parallel.tensor.styles import replicate as replicate
from pdrun.parallel.tensor.styles import row as row
from pdrun.parallel.tensor.styles import seq as seq
from pdrun.parallel.tensor.styles import vocab as vocab
from pdrun.parallel.tensor.vocab_cross_entropy import cross_entropy as cross_entropy
