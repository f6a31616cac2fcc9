"""
Recomputation: activations of a module are dropped after its forward pass and recomputed in the
backward pass.

    "full"                     each unit (member of a ModuleList or Sequential) keeps its input only
    "selective"                each unit also keeps results of matrix products and attention
    ["blocks.*"]               the modules of these names, in full
    ("blocks.*", "selective")  the modules of these names, with a policy
    {"modules": "blocks.*", "mp_comm_recompute": False}
                               results of collectives along tensor axes are kept, not repeated
    {"recompute_slice_activation": True}
                               of each input a rank keeps its part along the tensor axes
    {"operators": "blocks.*.gelu"}
                               results of single operators of `pdrun.Operators` are not kept

The dict has the keys ``modules`` (a glob or globs; default: units, or none with ``operators``),
``policy`` ("full" or "selective"), ``mp_comm_recompute`` and ``recompute_slice_activation``,
MindSpore's names, whose defaults are True and False, and ``operators`` (a glob or globs of names
that `run.model.explain()` prints).

Caches of keys and values are off, and empty ones left out (`caches`). Dropout masks are the same:
see `pdrun.parallel.rng.step_rng`.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.comm.axis_transport import KeptResults
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import FIXED_AXES
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.model.caches import is_cache, leave_out_caches, turn_off_caches
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.model.forward_wrapper import wrap_forward
from pdrun.parallel.torch_compat import list_checkpoint_options

API_NAME = "recompute"
SAVED_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "linear",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""
ATen operators whose results ``selective`` keeps: they take long for the memory of their result.
"""


@dataclass(frozen=True)
class RecomputePolicy:
    """What is recomputed."""

    policy: str = "full"
    """"full" or "selective"."""
    globs: Sequence[str] | None = None
    """Names of modules; None: units."""
    repeats_collectives: bool = True
    """Whether collectives are repeated too; otherwise their results stay in memory."""
    operators: Sequence[str] = ()
    """Names of single operators."""
    slices_inputs: bool = False
    """Whether each rank of the tensor axes keeps a part of a module's inputs."""


def apply_recompute(model: nn.Module, value: Any, axes: MeshGroups | None = None) -> list[str]:
    """
    Make modules recompute; return their names.

    Args:
        axes: this rank's groups; None: there is one rank.

    Raises:
        UsageError: an unknown policy, a glob that matches no module, or sliced inputs without
            tensor axes.
    """
    if value is None or value is False or value == "none":
        return []
    policy = parse_recompute(value)
    axis = None
    if policy.slices_inputs:
        if axes is not None:
            axis = axes[tuple(name for name in axes.grid.names if name not in FIXED_AXES)]
        if axis is None or axis.size == 1:
            what = "recompute_slice_activation=True needs tensor axes of several ranks"
            raise UsageError(what, where=API_NAME, hint="mesh=pdrun.mesh(dp=-1, tp=2)")
    if policy.globs is None:
        names = [] if policy.operators else find_units(model, None)
    else:
        names = match_modules(model, policy.globs, API_NAME)
    if names:
        turn_off_caches(model)
    for name in names:
        slicer = None if axis is None else _InputSlicer(name, axis)
        wrap_forward(
            model.get_submodule(name),
            functools.partial(_wrap_checkpoint, module=name, policy=policy, slicer=slicer),
        )
    return names


def parse_recompute(value: Any) -> RecomputePolicy:
    """
    Return the meaning of ``recompute=``.

    Raises:
        UsageError: it has another form.
    """
    if isinstance(value, Mapping):
        return _parse_dict(value)
    if value is True or value in ("full", "selective"):
        return RecomputePolicy("full" if value is True else value)
    if isinstance(value, tuple) and len(value) == 2 and value[1] in ("full", "selective"):
        return RecomputePolicy(value[1], _parse_globs(value[0]))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return RecomputePolicy("full", _parse_globs(value))
    raise _refuse(value)


def _parse_dict(value: Mapping[str, Any]) -> RecomputePolicy:
    keys = (*("modules", "policy", "mp_comm_recompute", "recompute_slice_activation", "operators"),)
    for key in value:
        if key not in keys:
            hint = did_you_mean(str(key), keys)
            raise UsageError(f"there is no key {key!r}", where=API_NAME, hint=hint)
    policy = value.get("policy", "full")
    repeats = value.get("mp_comm_recompute", True)
    slices = value.get("recompute_slice_activation", False)
    if policy not in ("full", "selective") or not all(
        isinstance(one, bool) for one in (repeats, slices)
    ):
        raise _refuse(value)
    modules = value.get("modules")
    globs = None if modules is None else _parse_globs(modules)
    operators = _parse_globs(value.get("operators", []))
    return RecomputePolicy(policy, globs, repeats, operators, slices)


def _parse_globs(value: Any) -> list[str]:
    globs = [value] if isinstance(value, str) else value
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise _refuse(value)
    return list(globs)


def _refuse(value: Any) -> UsageError:
    what = "recompute must be 'full', 'selective', a list of globs, (globs, 'selective') or a dict"
    hint = '{"modules": "blocks.*", "policy": "full", "mp_comm_recompute": False}'
    return UsageError(f"{what}, got {value!r}", where=API_NAME, hint=hint)


def match_modules(model: nn.Module, globs: Sequence[str], where: str) -> list[str]:
    """
    Return the names of modules that globs match, outermost ones only.

    Raises:
        UsageError: a glob that matches no module.
    """
    known = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for glob in globs:
        hits = fnmatch.filter(known, glob)
        if not hits:
            raise UsageError(
                f"{glob!r} matches no module", where=where, hint=did_you_mean(glob, known)
            )
        chosen += [name for name in hits if name not in chosen]
    # an outer module includes the modules inside it
    return [name for name in chosen if not any(name.startswith(other + ".") for other in chosen)]


class _InputSlicer:
    """
    Keeps a part of each input of a module until its recomputation, which gathers them.

    Args:
        module: its name, for errors.
        axis: ranks that have the same inputs.
    """

    def __init__(self, module: str, axis: AxisGroup) -> None:
        self._module = module
        self._axis = axis
        self._is_checked = False

    def bind(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return a function that calls ``forward``, the second time with gathered inputs."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if self._is_large(leaf)]
        if not self._is_checked:
            self._check_replicated([leaves[at] for at in places])
        parts = {at: (self._take_part(leaves[at]), leaves[at].shape) for at in places}
        needs_grad = {at: leaves[at].requires_grad for at in places}
        others = [None if at in parts else leaf for at, leaf in enumerate(leaves)]
        first = [leaves]
        del leaves

        def run() -> Any:
            filled = first.pop() if first else list(others)
            for at, (part, shape) in parts.items():
                if filled[at] is None:
                    with KeptResults().recording():  # not a collective of the module
                        full = self._axis.all_gather(part, 0, shape.numel())
                    filled[at] = full.view(shape).requires_grad_(needs_grad[at])
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, structure)
            return forward(*inner_args, **inner_kwargs)

        return run

    def _is_large(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.is_floating_point()
            and leaf.numel() >= self._axis.size
        )

    def _take_part(self, tensor: torch.Tensor) -> torch.Tensor:
        low, high = shard_range(tensor.numel(), self._axis.size, self._axis.index)
        return tensor.detach().reshape(-1)[low:high].clone()

    def _check_replicated(self, tensors: list[torch.Tensor]) -> None:
        """Refuse inputs that differ between the ranks, once."""
        if not tensors or isinstance(tensors[0], FakeTensor):
            return
        self._is_checked = True
        sums = torch.stack([tensor.detach().double().sum() for tensor in tensors])
        for other in self._axis.all_gather(sums, 0).view(self._axis.size, -1):
            if not torch.allclose(other, sums, rtol=1e-3, equal_nan=True):
                what = f"{self._module} has other inputs on each rank along the tensor axes"
                hint = "leave recompute_slice_activation out: the inputs are sharded already"
                raise UsageError(what, where=API_NAME, hint=hint)


def _wrap_checkpoint(
    forward: Callable[..., Any], module: str, policy: RecomputePolicy, slicer: _InputSlicer | None
) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    options |= list_checkpoint_options()
    if policy.policy == "selective" or not policy.repeats_collectives:
        options["context_fn"] = functools.partial(_make_contexts, policy, module)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if any(map(is_cache, (*args, *kwargs.values()))):
            args, kwargs = leave_out_caches(forward, args, kwargs)
        if any(map(is_cache, (*args, *kwargs.values()))):
            raise UsageError(
                "a cache of keys and values is given to a module that is recomputed, and would be"
                " filled twice",
                where=API_NAME,
                hint="use_cache=False in the call of the model; pdrun has set it in model.config",
            )
        if slicer is not None:
            return torch_checkpoint.checkpoint(slicer.bind(forward, args, kwargs), **options)
        return torch_checkpoint.checkpoint(forward, *args, **options, **kwargs)

    return run


def _make_contexts(
    policy: RecomputePolicy, module: str
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward pass and of its recomputation."""
    pairs: list[tuple[Any, Any]] = []
    if policy.policy == "selective":
        first, again = torch_checkpoint.create_selective_checkpoint_contexts(_choose_policy)
        pairs.append((first, _enter_both(_explain_mutation(module), again)))
    if not policy.repeats_collectives:
        kept = KeptResults()
        pairs.append((kept.recording(), kept.replaying()))
    if len(pairs) == 1:
        return pairs[0]
    return _enter_both(pairs[0][0], pairs[1][0]), _enter_both(pairs[0][1], pairs[1][1])


@contextmanager
def _enter_both(
    outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _explain_mutation(module: str) -> Iterator[None]:
    """
    Inside, a result that was kept and then changed is refused by name.

    Raises:
        UsageError: torch has found one.
    """
    try:
        yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise UsageError(
            f"{module} changes the result of a matrix product or of attention in place, which"
            " recompute='selective' has kept for the backward",
            where=API_NAME,
            hint=f'recompute="full", or ("GLOBS", "selective") without {module}; or its code:'
            " x = x / y in place of x /= y",
        ) from error


def _choose_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    policy = torch_checkpoint.CheckpointPolicy
    name = (
        operator.overloadpacket.__name__ if hasattr(operator, "overloadpacket") else str(operator)
    )
    return policy.MUST_SAVE if name in SAVED_OPERATORS else policy.PREFER_RECOMPUTE
