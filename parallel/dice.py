"""
Randomness that does not depend on the number of ranks.

*Dropout* is placed by global row: whether an element is dropped is a hash of (seed, step, how many dropouts came
before it in the forward pass, index of its row in the global batch, place in the row). No number of ranks or
micro-batches enters. While a step runs, the functions of ``torch.nn.functional`` that drop are replaced; modules call
them, so nothing in a model changes. The rows lie along dim 0 of the tensor, possibly flattened with what follows:
``[rows * k, ...]``.

*Everything else* that draws from torch's generators inside a step (noise, stochastic depth) is seeded by (seed, step,
slice): the same on any number of ranks that work on the same slices.

A recomputed forward pass must find its own masks again. Each dropout draws one number from torch's generator; the
order in which numbers first appear counts the dropouts. A checkpoint that restores the generator, as torch's does,
draws the same numbers again, and these are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

MASK = (1 << 64) - 1
PIECE = 65536
"""Elements."""
_LOW31 = 0x7FFFFFFF


def mix(*numbers: int) -> int:
    """Return 63 well mixed bits of some whole numbers (splitmix64's finaliser, chained)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state >> 1


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each 32-bit integer, in place (murmur3's finaliser)."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85ebca6b
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xc2b2ae35
    x ^= (x >> 16) & 0xFFFF
    return x


def uniform31(key: int, rows: torch.Tensor, width: int) -> torch.Tensor:
    """
    Return ``[len(rows), width]`` integers, uniform in 0..2**31 - 1: a hash of key, row and place in the row.

    Args:
        key: 63 bits.
        rows: global indices, int32.
        width: elements of a row.
    """
    row = _scramble(rows ^ ((key & MASK) >> 32))
    place = _scramble(torch.arange(width, dtype=torch.int32, device=rows.device) + (key & _LOW31))
    return _scramble(place.unsqueeze(0) ^ row.unsqueeze(1)) & _LOW31


def at_least(key: int, rows: torch.Tensor, width: int, limit: int) -> torch.Tensor:
    """Return where `uniform31` is at least ``limit``; on a CPU in pieces that stay in its cache."""
    piece = len(rows) if rows.device.type != "cpu" else max(1, PIECE // max(width, 1))
    return torch.cat([uniform31(key, some, width) >= limit for some in rows.split(piece)])


class Dice:
    """
    The randomness of one run.

    Args:
        seed: the run's.
        native: leave dropout to torch's generators, seeded by slice: faster, equal for equal slices only.
    """

    def __init__(self, seed: int, native: bool = False) -> None:
        self.seed, self.native = seed, native
        self._step = 0
        self._rows: torch.Tensor | None = None
        self._seen: dict[int, int] = {}
        self.used = False
        """Whether anything has been dropped yet."""

    def throw(self, step: int, index: int, rows: range, device: torch.device) -> None:
        """Begin a micro-batch: slice ``index`` of ``step``, which is these rows of the global batch."""
        seed = mix(self.seed, step, index, 1)
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        self._step, self._seen = step, {}
        self._range, self._device, self._rows = rows, device, None

    @contextmanager
    def placed(self, training: bool = True) -> Iterator[None]:
        """While this lasts, ``torch.nn.functional`` drops by global row."""
        if self.native or not training:
            yield
            return
        old = {name: getattr(functional, name) for name in _REPLACED}
        for name, make in _REPLACED.items():
            setattr(functional, name, make(self, old[name]))
        try:
            yield
        finally:
            for name, function in old.items():
                setattr(functional, name, function)

    def keep(self, like: torch.Tensor, p: float, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return which elements stay, as a boolean tensor of ``shape`` (default: that of ``like``)."""
        self.used = True
        shape = tuple(like.shape) if shape is None else shape
        if self._rows is None:
            low = self._range
            self._rows = torch.arange(low.start, low.stop, dtype=torch.int32, device=self._device)
        drawn = int(torch.randint(1 << 62, (), device="cpu", generator=torch.default_generator))
        call = self._seen.setdefault(drawn, len(self._seen))
        key = mix(self.seed, self._step, call, 2)
        rows = self._rows if self._rows.device == like.device else self._rows.to(like.device)
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.ones(shape, dtype=torch.bool, device=like.device)
        if len(rows) == 0 or (shape and shape[0] % len(rows)):
            rows = torch.zeros(1, dtype=torch.int32, device=like.device)  # no row of the batch: the same everywhere
        return at_least(key, rows, count // len(rows), int(p * (1 << 31))).view(shape)


# ---- what stands in for torch.nn.functional's functions ----------------------------------------------------------


def _dropped(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    scale = keep.to(x.dtype).mul_(0.0 if p >= 1 else 1 / (1 - p))
    return x * scale


def _make_dropout(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1:
            return original(input, p, training, inplace)
        result = _dropped(input, dice.keep(input, p), p)
        return input.copy_(result) if inplace else result

    return dropout


def _make_channels(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout of whole channels, ``[rows, channels, ...]``."""

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1 or input.dim() < 3:
            return original(input, p, training, inplace)
        keep = dice.keep(input, p, (*input.shape[:2], *[1] * (input.dim() - 2)))
        result = _dropped(input, keep, p)
        return input.copy_(result) if inplace else result

    return dropout


def _make_alpha(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    """
    Alpha dropout (Klambauer et al., Self-Normalizing Neural Networks, 2017): keeps mean 0 and variance 1 after
    SELU.
    """

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p < 1:
            return original(input, p, training, inplace)
        low = -1.7580993408473766  # -scale * alpha of SELU
        a = (1 / ((1 - p) * (1 + p * low * low))) ** 0.5
        result = torch.where(dice.keep(input, p), input, low) * a - a * p * low
        return input.copy_(result) if inplace else result

    return dropout


def _make_attention(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that drops is computed in the open; without dropout torch's own kernels do it."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0:
            return original(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            else:
                scores = scores + attn_mask
        weights = scores.softmax(-1)
        return _dropped(weights, dice.keep(weights, dropout_p), dropout_p) @ value

    return attention


_REPLACED: dict[str, Callable[[Dice, Callable[..., Any]], Callable[..., Any]]] = {
    "dropout": _make_dropout,
    "dropout1d": _make_channels,
    "dropout2d": _make_channels,
    "dropout3d": _make_channels,
    "alpha_dropout": _make_alpha,
    "scaled_dot_product_attention": _make_attention,
}
