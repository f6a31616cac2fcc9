"""Errors of torch about types, in a model that computes with other types than its weights have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pdrun.errors import UsageError

_TYPE_ERROR = re.compile(
    r"same dtype|expected scalar type|dtype mismatch|type .* should be the same|mixed dtype"
    r"|invalid dtype",
    re.IGNORECASE,
)


@contextmanager
def explained_types(model: nn.Module) -> Iterator[None]:
    """
    Inside, an error of torch about types says so, and names the buffers that can be its reason.

    Raises:
        UsageError: such an error, of a model with weights of 16 bits.
    """
    try:
        yield
    except RuntimeError as error:
        if _TYPE_ERROR.search(str(error)) is None or not _is_narrow(model):
            raise
        names = list(find_wide_buffers(model))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reason = f"its buffers {', '.join(names[:3])}{more} are in fp32 and so are values computed"
        reason += " with them"
        raise UsageError(
            "the model computes in 16 bits, but"
            f" {reason if names else 'its forward makes values of another type'}:"
            f" {str(error).splitlines()[0]}",
            where="pdrun.parallelize",
            hint='precision=pdrun.Precision("bf16", autocast=True) takes care of both types; or'
            " cast the values to the type of the activations in forward",
        ) from error


def _is_narrow(model: nn.Module) -> bool:
    """Return whether most weights of a model have 16 bits."""
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point() and param.itemsize > 1:  # a byte is a quantised value
            sizes[param.dtype] += max(param.numel(), 1)
    return bool(sizes) and sizes.most_common(1)[0][0] in (torch.bfloat16, torch.float16)


def find_wide_buffers(model: nn.Module) -> Iterator[str]:
    """
    Yield the names of fp32 buffers of a model whose weights are of 16 bits, without statistics of
    normalisations.
    """
    if not _is_narrow(model):
        return
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:
                yield f"{path}.{name}" if path else name
