"""
Decode with a compiled step, on CUDA as a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.inference.decode import (
    CachedSession,
    DecodeStep,
    GenerationSession,
    SessionFactory,
    compute_last,
    make_static_cache,
)
from pdrun.parallel.inference.encoder_decoder import EncoderInputs
from pdrun.parallel.inference.prompts import Prompts
from pdrun.parallel.torch_compat import exclude_untraced

CUDA_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True,
    "coordinate_descent_tuning": True,
    "realize_opcount_threshold": 10,
}
"""
Of torch.compile on CUDA. A product with one row is then a tuned kernel, which reads weights at
nearly the memory's rate. The last one keeps an activation from being computed again for each output
of the product that follows.
"""
CPU_BACKEND = "inductor"
"""The backend of torch.compile on CPUs."""


def compile_session(session: SessionFactory, model: nn.Module) -> SessionFactory:
    """
    Return sessions whose decode step is compiled: once per number of rows and places.

    Raises:
        UsageError: the model has no cache of fixed shape.
    """
    if session is not CachedSession:
        raise UsageError(
            f"compile=True is not supported for {type(model).__name__}",
            where="pdrun.infer",
            hint="it needs a causal model of transformers, whose caches have a fixed shape",
        )
    exclude_untraced()
    is_cuda = next(model.parameters()).is_cuda
    options: dict[str, Any] = {"backend": CPU_BACKEND}
    if is_cuda:
        from torch import _inductor

        known = _inductor.list_options()
        options = {"options": {key: CUDA_OPTIONS[key] for key in CUDA_OPTIONS if key in known}}
    step: DecodeStep = torch.compile(compute_last, dynamic=False, **options)
    return CompiledSessions(_with_fused_attention(step) if is_cuda else step)


def _with_fused_attention(step: DecodeStep) -> DecodeStep:
    """
    Return a step whose attention is written out, so that the compiler fuses it: for one query the
    kernels of attention are slower.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def compute(model: nn.Module, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return step(model, ids, given)

    return compute


def _make_plain_cache(model: nn.Module, places: int) -> Any:
    """
    Return a cache whose layers have all places, also those with a window: a layer that moves its
    window counts tokens in Python, so that each token would be compiled again.
    """
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    cache = make_static_cache(model, places)
    for index, layer in enumerate(cache.layers):
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(max_cache_len=places)
    return cache


class CompiledSessions:
    """
    Sessions with a compiled step. The cache of the last one is used again for as many rows and
    places: CUDA graphs are bound to its memory, and would be recorded again.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._key: tuple[nn.Module, int, int] | None = None
        self._cache: Any = None

    def __call__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
    ) -> GenerationSession:
        """See `SessionFactory`."""
        key = model, len(prompts.ids), places
        if self._key == key:
            self._cache.reset()
        else:
            self._cache = None  # frees its memory before that of the next one is taken
            self._key, self._cache = key, _make_plain_cache(model, places)
        return CachedSession(model, prompts, places, device, inputs, self._step, self._cache)
