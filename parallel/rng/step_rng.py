"""
Randomness that does not depend on the number of ranks.

*Dropout* is placed by global row: whether an element is dropped is a hash of (seed, step, how many dropouts came
before it in the forward pass, index of its row in the global batch, place in the row). No number of ranks or
micro-batches enters. While a step runs, the functions of ``torch.nn.functional`` that drop are replaced; modules call
them, so nothing in a model changes. The rows lie along dim 0 of the tensor, possibly flattened with what follows:
``[rows * k, ...]``.

*Everything else* that draws from torch's generators inside a step (noise, stochastic depth) is seeded by (seed, step,
slice): the same on any number of ranks that work on the same slices.

A recomputed forward pass must find its own masks again. Each dropout draws one number from torch's
generator; the order in which numbers first appear counts the dropouts. A checkpoint that restores
the generator, as torch's does, draws the same numbers again, and these are looked up, whatever
other micro-batches have come in between.

Where a tensor is cut over ranks, its mask is a part of the whole tensor's: whoever cuts it says so
with `region`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from pdrun.parallel import torch_compat as compat
from pdrun.parallel.layouts.sequence_order import Ranges, within

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


def uniform31(key: int, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """
    Return ``[len(rows), len(places)]`` integers, uniform in 0..2**31 - 1: a hash of key, row and
    place in the row.

    Args:
        key: 63 bits.
        rows: global indices, int32.
        places: of elements in their row, int32.
    """
    row = _scramble(rows ^ ((key & MASK) >> 32))
    place = _scramble(places + (key & _LOW31))
    return _scramble(place.unsqueeze(0) ^ row.unsqueeze(1)) & _LOW31


def at_least(key: int, rows: torch.Tensor, places: torch.Tensor, limit: int) -> torch.Tensor:
    """Return where `uniform31` is at least ``limit``; on a CPU in pieces that stay in its cache."""
    piece = len(rows) if rows.device.type != "cpu" else max(1, PIECE // max(len(places), 1))
    return torch.cat([uniform31(key, some, places) >= limit for some in rows.split(piece)])


# ---- parts of tensors -------------------------------------------------------

Cut = tuple[int, int, int] | tuple[tuple[tuple[int, int], ...], int]
"""
(low, high, total) of a dim, or (ranges, total) where several ranges lie here, one after the other.
"""
_regions: list[dict[int, Cut]] = []
"""The regions that are entered, the innermost last."""
_sequence: Callable[[], tuple[Ranges, int]] | None = None
"""Tells which positions of the sequences are here, and how many there are."""
_current: Dice | None = None


def current() -> Dice | None:
    """Return the randomness of the step that is being computed; None outside of one."""
    return _current


class region:
    """
    While this lasts, tensors that are dropped are parts: the masks are those of the whole ones.

    Args:
        cuts: for each dim that is cut (it may be counted from the end) which elements are here:
            ``{1: (0, 512, 2048)}``
            or ``{1: (((0, 256), (1792, 2048)), 2048)}``. A dim counts where a tensor has it in the size of the part.

    An empty mapping ends the region that surrounds it.
    """

    def __init__(self, cuts: Mapping[int, Cut]) -> None:
        self.cuts = cuts

    def __enter__(self) -> None:
        _regions.append(dict(self.cuts))

    def __exit__(self, *error: object) -> None:
        _regions.pop()


@contextmanager
def sequence(where: Callable[[], tuple[Ranges, int]]) -> Iterator[None]:
    """
    While this lasts, dim 1 of tensors is cut, before any `region` cuts what is left of it.

    Args:
        where: returns which ranges are here, and the whole size.
    """
    global _sequence
    before = _sequence
    _sequence = where
    try:
        yield
    finally:
        _sequence = before


def cuts_of(shape: tuple[int, ...]) -> dict[int, tuple[tuple[tuple[int, int], ...], int]]:
    """
    Return the dims of a tensor that the innermost region cuts, each with the ranges that are here
    and its total.
    """
    found = {}
    for dim, cut in (_regions[-1] if _regions else {}).items():
        place = dim + len(shape) if dim < 0 else dim
        ranges, total = (cut[0], cut[1]) if len(cut) == 2 else (((cut[0], cut[1]),), cut[2])
        if 0 <= place < len(shape) and shape[place] == sum(high - low for low, high in ranges):
            found[place] = (ranges, total)
    return found


def _with_sequence(
    shape: tuple[int, ...], rows: int, cuts: dict[int, tuple[Ranges, int]]
) -> tuple[tuple[int, ...], dict[int, tuple[Ranges, int]]]:
    """
    Return the shape and the cuts of a tensor whose positions are cut, in dim 1 or flattened behind
    rows in dim 0.
    """
    if _sequence is None or not shape:
        return shape, cuts
    ranges, total = _sequence()
    held = sum(high - low for low, high in ranges)
    inner, size = cuts.get(1, (((0, shape[1]),), shape[1])) if len(shape) > 1 else ((), 0)
    if size == held:
        return shape, {
            **cuts,
            1: (tuple(one for low, high in inner for one in within(ranges, low, high)), total),
        }
    if rows and shape[0] == rows * held and 0 not in cuts:
        apart = {dim + 1: cut for dim, cut in cuts.items()}
        return (rows, held, *shape[1:]), {**apart, 1: (ranges, total)}
    return shape, cuts


def _indices(
    shape: tuple[int, ...],
    cuts: Mapping[int, tuple[tuple[tuple[int, int], ...], int]],
    device: torch.device,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """
    Return where each element of a part is in the flattened whole, flattened, and the whole's shape.
    """
    whole = tuple(cuts[dim][1] if dim in cuts else size for dim, size in enumerate(shape))
    found = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        ranges = cuts[dim][0] if dim in cuts else ((0, size),)
        along = torch.cat([torch.arange(low, high, device=device) for low, high in ranges])
        found = found.unsqueeze(-1) + along * torch.Size(whole[dim + 1 :]).numel()
    return found.reshape(-1), whole


@dataclass(eq=False)
class Throw:
    """The dropouts of one forward pass."""

    step: int
    rows: torch.Tensor
    """Which rows of the global batch are computed, int32."""
    calls: int
    """How many dropouts there have been, in the forward passes of the stages before too."""


class Dice:
    """
    The randomness of one run.

    Args:
        seed: the run's.
        native: leave dropout to torch's generators, seeded by slice: faster, equal for equal slices
            only.
    """

    def __init__(self, seed: int, native: bool = False) -> None:
        self.seed = seed
        self.native = native
        self._standins: dict[str, tuple[Any, Callable[..., Any]]] = {}
        """
        Each replaced function and what drops in its place: made once, for compiled code relies on
        its identity.
        """
        self._throws: dict[tuple[int, int], Throw] = {}
        self._throw: Throw | None = None
        self._step = -1
        self._seen: dict[int, tuple[Throw, int]] = {}
        """By what was drawn from the generator: which dropout of which forward pass it is."""
        self.used = False
        """Whether anything has been dropped yet."""

    @property
    def calls(self) -> int:
        """
        How many dropouts the newest forward pass has had so far, those of the stages before it
        included.
        """
        return self._throw.calls if self._throw is not None else 0

    def throw(
        self,
        step: int,
        index: int,
        rows: range,
        device: torch.device,
        *,
        part: int = 0,
        calls: int = 0,
    ) -> None:
        """
        Begin the forward pass of a micro-batch: slice ``index`` of ``step``, which is these rows of
        the global batch.

        Args:
            part: tells the parts of a model apart that compute the same slice in this process.
            calls: how many dropouts the parts before this one had.
        """
        seed = mix(self.seed, step, index, 1, *([part] if part else []))
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        if (
            self._step != step
        ):  # not that of `_throw`, which is another step's where a copy has just entered
            self._throws.clear()
            self._seen.clear()
            self._step = step
        old = self._throws.get((index, part))
        if old is not None:
            self._seen = {drawn: call for drawn, call in self._seen.items() if call[0] is not old}
        numbers = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)
        self._throw = self._throws[index, part] = Throw(step, numbers, calls)

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """
        While this lasts, torch's generators are the run's; then they go on as if it had drawn
        nothing.

        They are seeded by slice, so that ranks differ: what a program draws between two steps
        would, too.
        """
        kit = getattr(torch, device.type) if device.type != "cpu" else None
        host = torch.default_generator.get_state()
        state = kit.get_rng_state(device) if kit is not None else None
        try:
            yield
        finally:
            torch.default_generator.set_state(host)
            if kit is not None:
                kit.set_rng_state(state, device)

    @contextmanager
    def placed(self, training: bool = True) -> Iterator[None]:
        """While this lasts, ``torch.nn.functional`` drops by global row."""
        global _current
        if _current is self:  # whoever came first leaves last
            yield
            return
        before = _current
        _current = self
        old = {name: getattr(functional, name) for name in _REPLACED}
        if training and not self.native:
            for name, make in _REPLACED.items():
                if self._standins.get(name, (None,))[0] is not old[name]:
                    self._standins[name] = old[name], make(self, old[name])
                setattr(functional, name, self._standins[name][1])
        try:
            yield
        finally:
            _current = before
            for name, function in old.items():
                setattr(functional, name, function)

    @compat.untraced
    def keep(
        self, like: torch.Tensor, p: float, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """
        Return which elements stay, as a boolean tensor of ``shape`` (default: that of ``like``).

        Inside a `region` it is the part of the whole tensor's mask.
        """
        shape = tuple(like.shape) if shape is None else shape
        drawn = self.draw()
        apart, cuts = _with_sequence(shape, len(drawn[0].rows), cuts_of(shape))
        return self.mask(drawn, p, apart, cuts, like.device).view(shape)

    def mask(
        self,
        drawn: tuple[Throw, int],
        p: float,
        shape: tuple[int, ...],
        cuts: Mapping[int, tuple[Ranges, int]],
        device: torch.device,
    ) -> torch.Tensor:
        """
        Return which elements of a part stay, of the dropout that `draw` has counted.

        Args:
            shape: of the part.
            cuts: for each dim that is cut the ranges that are here and the whole size.
        """
        self.used = True
        throw, call = drawn
        key = mix(self.seed, throw.step, call, 2)
        limit = int(p * (1 << 31))
        rows = throw.rows if throw.rows.device == device else throw.rows.to(device)
        whole = tuple(cuts[dim][1] if dim in cuts else size for dim, size in enumerate(shape))
        if torch.Size(shape).numel() == 0:
            return torch.ones(shape, dtype=torch.bool, device=device)
        if len(rows) == 0 or (whole and whole[0] % len(rows)):
            rows = torch.zeros(
                1, dtype=torch.int32, device=device
            )  # no row of the batch: the same everywhere
        if 0 in cuts:  # rows themselves are cut: each element is looked up
            flat, _ = _indices(shape, cuts, device)
            width = torch.Size(whole).numel() // len(rows)
            return _single(key, rows[flat // width], (flat % width).to(torch.int32), limit).view(
                shape
            )
        if not cuts:
            places = torch.arange(
                torch.Size(shape).numel() // len(rows), dtype=torch.int32, device=device
            )
        else:
            inner = (shape[0] // len(rows), *shape[1:])  # of a row
            places = _indices(inner, cuts, device)[0].to(torch.int32)
        return at_least(key, rows, places, limit).view(shape)

    def leave(self, device: torch.device) -> Any:
        """
        Return what `enter` needs to go on here later, when another forward or backward has come in
        between.
        """
        kit = getattr(torch, device.type)
        state = kit.get_rng_state(device) if device.type != "cpu" else None
        return torch.default_generator.get_state(), state, self._throw, list(_regions)

    def enter(self, kept: Any, device: torch.device) -> None:
        """Go on where `leave` was called."""
        host, state, self._throw, _regions[:] = kept
        torch.default_generator.set_state(host)
        if state is not None:
            getattr(torch, device.type).set_rng_state(state, device)

    def draw(self) -> tuple[Throw, int]:
        """Count a dropout; return which one of which forward pass it is."""
        with (
            unset_fake_temporarily()
        ):  # memory is estimated on tensors without data; this number is needed
            drawn = int(torch.randint(1 << 62, (), device="cpu", generator=torch.default_generator))
        found = self._seen.get(drawn)
        if found is None:
            assert self._throw is not None
            found = self._seen[drawn] = self._throw, self._throw.calls
            self._throw.calls += 1
        return found


def _single(key: int, rows: torch.Tensor, places: torch.Tensor, limit: int) -> torch.Tensor:
    """Return where the hash of each element's own row and place is at least ``limit``."""
    row = _scramble(rows ^ ((key & MASK) >> 32))
    return (_scramble(_scramble(places + (key & _LOW31)) ^ row) & _LOW31) >= limit


# ---- what stands in for torch.nn.functional's functions ---------------------


def _dropped(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    scale = keep.to(x.dtype).mul_(0.0 if p >= 1 else 1 / (1 - p))
    return x * scale


def _make_dropout(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1:
            return original(input, p, training, inplace)
        result = _dropped(input, dice.keep(input, p), p)
        return input.copy_(result) if inplace else result

    return dropout


def _make_channels(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout of whole channels, ``[rows, channels, ...]``."""

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or not 0 <= p <= 1 or input.dim() < 3:
            return original(input, p, training, inplace)
        keep = dice.keep(input, p, (*input.shape[:2], *[1] * (input.dim() - 2)))
        result = _dropped(input, keep, p)
        return input.copy_(result) if inplace else result

    return dropout


def _make_alpha(dice: Dice, original: Callable[..., Any]) -> Callable[..., Any]:
    """
    Alpha dropout (Klambauer et al., Self-Normalizing Neural Networks, 2017): keeps mean 0 and
    variance 1 after SELU.
    """

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
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
            return original(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(times, -3)
            value = value.repeat_interleave(times, -3)
        scores = (
            query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        )
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
