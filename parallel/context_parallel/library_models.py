"""
Models of the transformers library over sharded sequences.

* Attention that is written out ("eager") becomes torch's attention function, where the model
  supports that.
* Masks are made by the library for the positions that a forward sees, from 0 on. While a run
  computes they are made for the full sequence.
* Position ids that a model would count from 0 are those of this rank.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.context_parallel.sequences import API_NAME, ShardedSequences

MASKS_MODULE = "transformers.masking_utils"
PREPROCESS = "_preprocess_mask_arguments"
POSITIONS = "position_ids"
_COUNTED_POSITIONS = re.compile(r"position_ids\s*=\s*torch\.arange\(")
"""In the source of a forward that counts positions from 0 if it gets none."""
_OPEN_ATTENTION = "eager"


def use_torch_attention(model: nn.Module) -> None:
    """
    Have models of the library compute attention by torch's function.

    Raises:
        UsageError: a model has attention that torch's function does not compute.
    """
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in (None, "sdpa"):
            continue
        setter = getattr(module, "set_attn_implementation", None)
        if setter is None:
            continue
        kind = type(module).__name__
        if not getattr(module, "_supports_sdpa", False):
            raise UsageError(
                f"{name or 'the model'} ({kind}) computes attention without"
                " torch.nn.functional.scaled_dot_product_attention, and has no other form",
                where=API_NAME,
                hint="use dp or tensor axes instead of cp",
            )
        setter("sdpa")


def hook_positions(
    model: nn.Module, current: Callable[[], ShardedSequences | None], has_tables: bool
) -> None:
    """
    Give this rank's position ids to modules that would count them from 0.

    Args:
        current: returns the sequences of the forward that is computed now.
        has_tables: whether the user gave tables of positions.
    """
    counting = [module for module in model.modules() if _counts_positions(module)]
    for module in counting:
        module.register_forward_pre_hook(
            functools.partial(_add_positions, current), with_kwargs=True
        )
    takes_positions = POSITIONS in _parameters_of(model) and hasattr(model, "config")
    if takes_positions and not counting and not has_tables:
        model.register_forward_pre_hook(
            functools.partial(_require_positions, current), with_kwargs=True
        )


def _parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


def _counts_positions(module: nn.Module) -> bool:
    if not hasattr(module, "config") or POSITIONS not in _parameters_of(module):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return _COUNTED_POSITIONS.search(source) is not None


def _find_given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments


def _add_positions(
    current: Callable[[], ShardedSequences | None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    sequences = current()
    if sequences is None or _find_given(module, args, kwargs).get(POSITIONS) is not None:
        return None
    given = (*args, *kwargs.values())
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), None)
    kwargs = {**kwargs, POSITIONS: sequences.position_ids(device)[None]}
    names = list(_parameters_of(module))
    if len(args) > names.index(POSITIONS):  # given as None
        return (*args[: names.index(POSITIONS)], kwargs.pop(POSITIONS)), kwargs
    return args, kwargs


def _require_positions(
    current: Callable[[], ShardedSequences | None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if current() is None or _find_given(module, args, kwargs).get(POSITIONS) is not None:
        return
    raise UsageError(
        f"{type(module).__name__} gets no {POSITIONS} and would number the positions of each rank"
        " alike",
        where=API_NAME,
        hint=f'put "{POSITIONS}" of the full sequence into the batch, [rows, length], as the model'
        " numbers them in one process, or use tables=",
    )


@contextmanager
def full_masks(sequences: ShardedSequences) -> Iterator[None]:
    """Inside, the library makes masks for full sequences; attention takes its rows of them."""
    library: Any = sys.modules.get(MASKS_MODULE)
    original = getattr(library, PREPROCESS, None)
    if original is None:
        yield
        return
    setattr(library, PREPROCESS, functools.partial(_preprocess_full, original, sequences))
    try:
        yield
    finally:
        setattr(library, PREPROCESS, original)


def _preprocess_full(
    original: Callable[..., tuple[Any, ...]],
    sequences: ShardedSequences,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Do what the library's function does, with the arguments of the full sequence."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    embeds = given["inputs_embeds"]
    here = embeds.shape[1]
    if here not in sequences.sizes or given.get("encoder_hidden_states") is not None:
        return original(*args, **kwargs)
    given["inputs_embeds"] = embeds.detach()[:, :1].expand(-1, sequences.length, -1)
    for name in ("attention_mask", POSITIONS):
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == here:
            given[name] = sequences.gather_positions(value, 1)
    found = original(*bound.args, **bound.kwargs)
    if found[2] is not None:
        raise UsageError(
            f"{POSITIONS} restart within a row: packed sequences are not supported over cp",
            where=API_NAME,
            hint="one sequence per row, padded, with an attention_mask",
        )
    return found
