"""
Strategies for models that are not written for pdrun: by model type (`families`), by the plan that a
model of transformers has (`huggingface_plan`), and for all others by their modules (`any_model`).

Imports `parallel/tensor` and below. Start reading at `strategy_for` in `families.py`.
"""

from pdrun.parallel.tensor.presets.families import strategy_for as strategy_for
