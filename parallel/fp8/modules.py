"""
Chooses the linear modules of a rank's model that multiply in fp8, and changes them.

A module whose class is nn.Linear gets a subclass that multiplies in fp8. Modules of tensor axes
whose class says that it serves (``serves_fp8``) ask `scales_of` for how they multiply.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.fp8 import product
from pdrun.parallel.fp8.options import API_NAME, Fp8
from pdrun.parallel.model.find_units import find_units

PARALLELIZE = "pdrun.parallelize"
LEAST_CAPABILITY = (8, 9)
"""Compute capability of NVIDIA's devices from which they multiply in fp8."""
SCALES_ATTRIBUTE = "_pdrun_fp8_scales"
OUTSIDE = "outside of units"
_subclasses: dict[type, type] = {}


class Fp8Linear(nn.Linear):
    """A linear module that multiplies in fp8."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out]`` of ``[..., in]``, in bf16."""
        return product.linear(input, self.weight, self.bias, scales_of(self) or "")


@dataclass(frozen=True)
class Fp8Choice:
    """
    What was chosen.

    Attributes:
        scales: see `Fp8`.
        chosen: names of the modules of this rank's model that multiply in fp8, those of other
            stages included.
        others: names of its other linear modules, and why.
        everywhere: names of those that multiply in fp8 on any rank.
    """

    scales: str = ""
    chosen: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    everywhere: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Return lines for `Run.explain`."""
        if not self.scales:
            return []
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            by_reason.setdefault(reason, []).append(name)
        lines = [
            f"products in fp8, a scale per {self.scales}: {', '.join(self.chosen) or 'none here'}"
        ]
        lines += [
            f"products in bf16, {reason}: {', '.join(names)}" for reason, names in by_reason.items()
        ]
        return lines


def scales_of(module: nn.Module) -> str | None:
    """Return "tensor" or "row" for a module that multiplies in fp8, else None."""
    scales: str | None = getattr(module, SCALES_ATTRIBUTE, None)
    return scales


def check_device(device: torch.device, scales: str) -> None:
    """
    Refuse a device that cannot multiply in fp8.

    Raises:
        UsageError: says what is needed and what is there.
    """
    hint = 'precision="bf16"'
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            what = "precision='fp8' needs a device of compute capability {}.{} or higher (Ada,"
            what = what.format(*LEAST_CAPABILITY)
            what += f" Hopper, Blackwell), {torch.cuda.get_device_name(device)} has {found[0]}."
            raise UsageError(what + str(found[1]), where=PARALLELIZE, hint=hint)
    x = torch.ones(32, 32, dtype=product.COMPUTE_TYPE, device=device, requires_grad=True)
    try:
        y = product.linear(x, x, None, scales)
        is_right = bool((torch.autograd.grad(y.sum(), x)[0] == 64).all()) and bool((y == 32).all())
    except (RuntimeError, ValueError, TypeError) as error:  # what versions of torch raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        what = f"precision='fp8' needs a device that multiplies in fp8 with a scale per {scales};"
        raise UsageError(f"{what} {device}: {reason}", where=PARALLELIZE, hint=hint) from error
    if not is_right:
        what = f"precision='fp8' needs a device that multiplies in fp8; {device} does it wrongly"
        raise UsageError(what, where=PARALLELIZE, hint=hint)


def choose_modules(model: nn.Module, full: nn.Module, options: Fp8) -> Fp8Choice:
    """
    Return which linear modules multiply in fp8.

    Args:
        model: what this rank runs.
        full: the model before it was partitioned; the same object if it was not.

    Raises:
        UsageError: a glob matches no linear module, or only modules that cannot; or no module of
            the full model is chosen.
    """
    linears = find_linears(full)
    for glob in (*options.modules, *options.exclude):
        if not fnmatch.filter(linears, glob):
            what = f"{glob!r} matches no linear module"
            raise UsageError(what, where=API_NAME, hint=did_you_mean(glob, [*linears]))
    units = [] if options.modules else find_units(full, None)
    everywhere = {name: _refusal(name, module, options, units) for name, module in linears.items()}
    for glob in options.modules:
        reasons = [everywhere[name] for name in fnmatch.filter(linears, glob)]
        if all(reasons):
            raise UsageError(f"{glob!r} matches no module that can: {reasons[0]}", where=API_NAME)
    if all(everywhere.values()):
        what = "precision='fp8': no linear module of the model can multiply in fp8"
        if everywhere:
            name, reason = next(iter(everywhere.items()))
            what += f"; {name}: {reason}"
        hint = 'pdrun.Fp8(modules=["blocks.*"], least=0), or precision="bf16"'
        raise UsageError(what, where=PARALLELIZE, hint=hint)
    chosen, others = [], {}
    for name, module in find_linears(model).items():
        reason = _refusal(name, module, options, units)
        if reason:
            others[name] = reason
        else:
            chosen.append(name)
    return Fp8Choice(options.scales, tuple(chosen), others, tuple(chosen))


def use_fp8(model: nn.Module, names: Collection[str], scales: str) -> None:
    """Have modules of these names multiply in fp8, those of them that the model has."""
    for name, module in find_linears(model).items():
        if name not in names:
            continue
        kind = type(module)
        if not getattr(kind, "serves_fp8", False):
            module.__class__ = _subclass(kind)
        setattr(module, SCALES_ATTRIBUTE, scales)


def _subclass(kind: type) -> type:
    if kind is nn.Linear or issubclass(kind, Fp8Linear):
        return Fp8Linear if kind is nn.Linear else kind
    if kind not in _subclasses:
        made = type(f"Fp8{kind.__name__}", (Fp8Linear, kind), {"__module__": kind.__module__})
        _subclasses[kind] = made
    return _subclasses[kind]


def find_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear modules of a model, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def _refusal(name: str, module: nn.Linear, options: Fp8, units: Collection[str]) -> str:
    """Return why a module stays in bf16; the empty text if it does not."""
    if any(fnmatch.fnmatch(name, glob) for glob in options.exclude):
        return "excluded"
    if options.modules and not any(fnmatch.fnmatch(name, glob) for glob in options.modules):
        return "not named"
    if not options.modules and not any(name.startswith(f"{unit}.") for unit in units):
        return OUTSIDE
    kind = type(module)
    own = kind.forward is not nn.Linear.forward and not issubclass(kind, Fp8Linear)
    if "forward" in vars(module) or (own and not getattr(kind, "serves_fp8", False)):
        return f"a {kind.__name__} with another forward"
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "an attention module reads its weight"
    weight = module.weight
    if not weight.is_floating_point() or weight.element_size() == 1 or weight.dim() != 2:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    sizes = "x".join(map(str, weight.shape))
    if any(size % product.ALIGNMENT for size in weight.shape):
        return f"sizes must be multiples of {product.ALIGNMENT} ({sizes})"
    if weight.numel() < options.least:
        return f"fewer than least={options.least:,} elements"
    return ""
