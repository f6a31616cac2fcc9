"""
Styles for modules that are cut over tensor axes, and `Strategy`, which says what gets which.

For models that cannot be exported, or whose cut is to be said module by module. Everything computes on plain local
tensors with explicit collectives.
"""

from pdrun.parallel.modules.entropy import cross_entropy as cross_entropy
from pdrun.parallel.modules.highdim import linear2d as linear2d
from pdrun.parallel.modules.highdim import linear3d as linear3d
from pdrun.parallel.modules.presets import strategy_for as strategy_for
from pdrun.parallel.modules.strategy import Strategy as Strategy
from pdrun.parallel.modules.styles import col as col
from pdrun.parallel.modules.styles import heads as heads
from pdrun.parallel.modules.styles import replicate as replicate
from pdrun.parallel.modules.styles import row as row
from pdrun.parallel.modules.styles import seq as seq
from pdrun.parallel.modules.styles import vocab as vocab
