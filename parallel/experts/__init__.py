"""
Mixture of experts: `MoE`, and the style `experts`, which cuts experts over axes of a mesh.

May import: tensor, model, comm, layouts.
Start reading here: moe.py, then dispatch.py.
"""

from pdrun.parallel.experts.balance import Balance as Balance
from pdrun.parallel.experts.moe import MoE as MoE
from pdrun.parallel.experts.style import experts as experts
