"""
The plans of `model_zoo.py`, and what a rank does in a cell: three steps, compared with plain torch
in one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from zoo_models import Architecture, Batch, shifted_batch, token_loss

ROWS = (8, 7, 5)
"""Rows of the three steps."""
LEARNING_RATE = 0.05
MOMENTUM = 0.9
CLIP_NORM = 0.1
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Largest relative differences in fp32; of a gradient and a movement: of their norms."""
BF16_TOLERANCE = 3e-2
NORMALISED_FACTOR = 30.0
"""Batch normalisations amplify rounding."""
PLACEHOLDER = "-"


@dataclass(frozen=True)
class Plan:
    """
    One way to train a model.

    Attributes:
        mesh: degrees by axis.
        options: of `pdrun.parallelize`.
        kind: what divides the model: "data", "tensor", "operator", "pipeline", "context", or two.
    """

    mesh: dict[str, int]
    kind: tuple[str, ...] = ("data",)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())


FULL = {"accumulate": 2, "clip": CLIP_NORM, "recompute": "full"}
PLANS: dict[str, Plan] = {
    "level0": Plan({"dp": 2}),
    "level1": Plan({"dp": 2}, options={"optimizer_level": 1}),
    "level2": Plan({"dp": 2}, options={"optimizer_level": 2}),
    "level3": Plan({"dp": 2}, options={"optimizer_level": 3}),
    "accumulate": Plan({"dp": 2}, options={"optimizer_level": 1, **FULL}),
    "bf16": Plan({"dp": 2}, options={"optimizer_level": 1, "precision": "bf16"}),
    "tensor": Plan({"tp": 2}, ("tensor",)),
    "operator": Plan({"tp": 2}, ("operator",)),
    "pipeline": Plan({"pp": 2}, ("pipeline",)),
    "context": Plan({"cp": 2}, ("context",)),
    "dp-tp": Plan({"dp": 2, "tp": 2}, ("tensor",), {"optimizer_level": 2, "clip": CLIP_NORM}),
    "pp-dp": Plan({"pp": 2, "dp": 2}, ("pipeline",), {"optimizer_level": 1}),
    "pp-dp3": Plan({"pp": 2, "dp": 2}, ("pipeline",), {"optimizer_level": 3}),
    "pp-tp": Plan({"pp": 2, "tp": 2}, ("tensor", "pipeline")),
    "dp3-full": Plan({"dp": 2}, options={"optimizer_level": 3, **FULL}),
    "dp-cp": Plan({"dp": 2, "cp": 2}, ("context",), {"optimizer_level": 2}),
}
DEFAULT_PLANS = tuple(PLANS)


def applies(architecture: Architecture, plan: Plan) -> bool:
    """Return whether a plan is for this kind of model."""
    traits = architecture.traits
    if "context" in plan.kind and not {"causal", "transformers"} <= traits:
        return False
    # a slice has statistics of its own: no slicing gives those of the whole batch
    return "batchnorm" not in traits or not (
        {"accumulate"} & plan.options.keys() or "pipeline" in plan.kind
    )


@dataclass
class Trained:
    """What three steps gave."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def _build(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    model = architecture.build()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            # zeros hide faults: many heads and biases start with them
            generator = torch.Generator().manual_seed(index)
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.02)
    if "batchnorm" in architecture.traits:  # amplifies rounding until fp32 proves nothing
        model = model.double()
    return model.train()


def _batches(architecture: Architecture, is_shifted: bool) -> list[Batch]:
    make = shifted_batch if is_shifted else architecture.batch
    batches = [make(rows, step) for step, rows in enumerate(ROWS)]
    if "batchnorm" in architecture.traits:
        batches = [tree_map(_widen, batch) for batch in batches]
    return batches


def _widen(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])


def _call_without_positions(model: nn.Module, batch: Batch) -> Any:
    return model(input_ids=batch["input_ids"])


def train_plain(architecture: Architecture, clip: float | None) -> Trained:
    """Train with plain torch: the full batch in one process."""
    from pdrun.parallel.training.loss import call_model

    model = _build(architecture)
    found = Trained([], [], {}, _copies(model.named_parameters()), {})
    weights = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM)
    for batch in _batches(architecture, False):
        forward = architecture.forward or call_model
        loss = architecture.loss(forward(model, batch), batch)
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit = math.inf if clip is None else clip
        found.norms.append(float(nn.utils.clip_grad_norm_(weights, limit)))
        if not found.gradients:
            named = ((name, param.grad) for name, param in model.named_parameters())
            found.gradients = _copies((name, grad) for name, grad in named if grad is not None)
        found.losses.append(float(loss.detach()))
        optimizer.step()
    found.after = _copies(model.named_parameters())
    return found


def _copies(named: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _first_weights(model: nn.Module, sample: Batch) -> dict[str, Any]:
    """Return what a user would give first: the layout of one wide linear weight."""
    from pdrun import L

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and min(module.weight.shape) >= 8:
            return {f"{name}.weight": L("tp", None)}
        if isinstance(module, nn.Conv2d) and module.groups == 1 and module.out_channels >= 8:
            return {f"{name}.weight": L("tp", None, None, None)}
    return {}


def start_run(architecture: Architecture, plan: Plan) -> tuple[Any, list[Batch]]:
    """Return pdrun's run of an architecture under a plan, and its batches."""
    import pdrun

    model = _build(architecture)
    is_shifted = "context" in plan.kind
    batches = _batches(architecture, is_shifted)
    options = dict(plan.options)
    forward, loss = architecture.forward, architecture.loss
    if is_shifted:
        names = inspect.signature(model.forward).parameters
        forward = _call if "position_ids" in names else _call_without_positions
        loss = token_loss
        options["context"] = pdrun.ContextParallel()
    if "tensor" in plan.kind:
        options["strategy"] = (architecture.styles or pdrun.strategy_for)(model)
    if "operator" in plan.kind:
        options["sample"] = batches[0]
        options["strategy"] = pdrun.Operators(_first_weights(model, batches[0]))
    if "pipeline" in plan.kind:
        options["pipeline"] = pdrun.Pipeline(microbatches=2)
    if "batchnorm" in architecture.traits and plan.mesh.get("dp", 1) > 1:
        options["sync_batchnorm"] = True
    run = pdrun.parallelize(
        model,
        lambda params: torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM),
        loss,
        forward=forward,
        mesh=pdrun.mesh(**plan.mesh),
        norm=True,
        timeout=40.0,
        **options,
    )
    return run, batches


def train_cell(architecture: Architecture, plan: Plan, want: Trained) -> tuple[str, str]:
    """
    Train under a plan on this rank.

    Returns:
        ("equal", figures) or ("wrong", the differences and whether `verify` names them).
    """
    from pdrun.parallel.training.step import probe_gradients

    run, batches = start_run(architecture, plan)
    gradients = probe_gradients(run.state, batches[0])[2]
    metrics = [run.step(batch) for batch in batches]
    found = Trained(
        [m.loss for m in metrics],
        [m.grad_norm for m in metrics],
        gradients,
        want.before,
        _copies(run.full_weights().items()),
    )
    differences = compare(architecture, plan, found, want)
    if not differences:
        return "equal", ""
    try:
        named = f"verify passes: {run.verify([batches[0]])}"
    except Exception as error:
        named = f"verify: {str(error)[:200]}"
    return "wrong", f"{'; '.join(differences)}; {named}"


def compare(architecture: Architecture, plan: Plan, found: Trained, want: Trained) -> list[str]:
    """Return the differences that are more than rounding."""
    loss_limit, limit = LOSS_TOLERANCE, GRADIENT_TOLERANCE
    if "precision" in plan.options:
        loss_limit, limit = BF16_TOLERANCE, math.inf
    elif "batchnorm" in architecture.traits:
        loss_limit, limit = loss_limit * NORMALISED_FACTOR, limit * NORMALISED_FACTOR
    told = []
    for name, ours, theirs, most in (
        ("loss", found.losses, want.losses, loss_limit),
        ("norm", found.norms, want.norms, 10 * loss_limit),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
            if not abs(a - b) <= most * abs(b):
                told.append(f"{name} of step {step}: {a:.6g}, plain torch {b:.6g}")
    if limit == math.inf:
        return told
    told += _compare_tensors("gradient", found.gradients, want.gradients, limit)
    moved = {name: want.after[name] - before for name, before in want.before.items()}
    ours = {name: found.after[name] - before for name, before in want.before.items()}
    return told + _compare_tensors("movement", ours, moved, 10 * limit)


def _compare_tensors(
    what: str, found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float
) -> list[str]:
    total = math.sqrt(sum(float(x.double().square().sum()) for x in want.values()))
    worst, name = 0.0, ""
    for key, theirs in want.items():
        ours = found.get(key, torch.zeros_like(theirs)).double().cpu()
        scale = float(theirs.double().norm()) + 0.01 * total
        distance = float((ours - theirs.double()).norm()) / (scale or 1.0)
        if not distance <= worst:
            worst, name = distance, key
    if not worst <= limit:
        return [f"{what} of {name} differs by {worst:.1e}"]
    return []


Cell = Callable[[], tuple[str, str]]
