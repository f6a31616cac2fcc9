"""Errors of torch about types, in a model with buffers of another type than its weights."""

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
    Inside, an error of torch about types names the buffers that can be its reason.

    Raises:
        UsageError: there are such buffers, and weights of 16 bits.
    """
    try:
        yield
    except RuntimeError as error:
        if _TYPE_ERROR.search(str(error)) is None:
            raise
        names = list(find_wide_buffers(model))
        if not names:
            raise
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(
            f"the model computes in 16 bits, but its buffers {', '.join(names[:3])}{more} are in"
            f" fp32 and so are values computed with them: {str(error).splitlines()[0]}",
            where="pdrun.parallelize",
            hint='precision=pdrun.Precision("bf16", autocast=True) takes care of both types; or'
            " cast the result of the buffer to the type of the activations in forward",
        ) from error


def find_wide_buffers(model: nn.Module) -> Iterator[str]:
    """
    Yield the names of fp32 buffers of a model whose weights are of 16 bits, without statistics of
    normalisations.
    """
    sizes: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            sizes[param.dtype] += max(param.numel(), 1)
    if not sizes or sizes.most_common(1)[0][0] not in (torch.bfloat16, torch.float16):
        return
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:
                yield f"{path}.{name}" if path else name
