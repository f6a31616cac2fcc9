"""An example of every kind of operator that has a rule: what the checker proves rules with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.parallel.operators.rules.losses import ELEMENTWISE
from pdrun.parallel.operators.rules.normalization import SOFTMAX
from pdrun.parallel.operators.rules.pointwise import MANY, UNARY


@dataclass(frozen=True)
class Example:
    """
    One call of an operator, with real tensors of 64 bits.

    Attributes:
        grads: how many of its inputs, from the first on, have gradients to compare.
    """

    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    overload: str = ""
    grads: int = 99

    @property
    def target(self) -> Any:
        """What is called."""
        library = torch.ops.pdrun if self.kind in ("constrain", "stop") else torch.ops.aten
        packet = getattr(library, self.kind)
        return getattr(packet, self.overload) if self.overload else packet


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return (
        torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.8
        + 0.1
    )


def _n(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _b(*shape: int) -> torch.Tensor:
    return _x(*shape, seed=9) > 0.5


_MORE_ARGS: dict[str, tuple[Any, ...]] = {
    "clamp": (0.2, 0.7),
    "clip": (0.2, 0.7),
    "clamp_max": (0.5,),
    "clamp_min": (0.5,),
    "threshold": (0.4, 0.1),
    "full_like": (2.0,),
}
_INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__", "__or__")
_THREE = ("addcdiv", "addcmul", "lerp")


def examples() -> Iterator[Example]:
    """Return all examples; several of one kind where shapes or arguments matter."""
    for part in (_pointwise, _matrix, _views, _pieces, _reductions, _lookups):
        yield from part()
    for part in (_normalizations, _attention, _convolutions, _creation, _losses):
        yield from part()


def _pointwise() -> Iterator[Example]:
    for kind in UNARY:
        x = _n(5, 4, 6) if kind in _INTEGERS else _x(4, 6) + 1 if kind == "acosh" else _x(4, 6)
        yield Example(kind, (x, *_MORE_ARGS.get(kind, ())))
    for kind in MANY:
        if kind in _INTEGERS:
            yield Example(kind, (_n(8, 4, 6), _n(8, 6, seed=1)))
        elif kind in _THREE:
            yield Example(kind, (_x(4, 6), _x(4, 6, seed=1), _x(4, 1, seed=2)))
        else:
            yield Example(kind, (_x(4, 6), _x(6, seed=1)))
    for kind in ("add", "sub", "mul", "multiply", "div", "divide", "true_divide"):
        yield Example(kind, (_x(2, 4, 6), _x(4, 1, seed=1)))
        yield Example(kind, (_x(2, 4, 6), _x(2, 4, 6, seed=1)))
        yield Example(kind, (_x(4, 6), 3))
    for kind in ("clone", "neg", "negative", "positive", "real", "detach"):
        yield Example(kind, (_x(4, 6),))
    yield Example("constrain", (_x(4, 6), "[[[], []], []]"))
    yield Example("stop", (_x(4, 6),))
    yield Example("to", (_x(4, 6), torch.float32), overload="dtype")
    yield Example("_to_copy", (_x(4, 6),), {"dtype": torch.float32})
    yield Example("type_as", (_x(4, 6), _x(1, seed=1)))
    yield Example("where", (_b(4, 6), _x(4, 6), _x(6, seed=1)))
    yield Example("masked_fill", (_x(4, 6), _b(1, 6), 0))
    yield Example("masked_fill", (_x(4, 6), _b(4, 1), float("-inf")))
    yield Example("fill", (_x(4, 6), torch.tensor(2.0, dtype=torch.float64)))
    for kind in ("dropout", "native_dropout"):
        yield Example(kind, (_x(4, 6), 0.4, True))
        yield Example(kind, (_x(4, 6), 0.4, False))


def _matrix() -> Iterator[Example]:
    yield Example("mm", (_x(4, 6), _x(6, 8, seed=1)))
    yield Example("bmm", (_x(4, 4, 6), _x(4, 6, 8, seed=1)))
    yield Example("mv", (_x(4, 6), _x(6, seed=1)))
    yield Example("dot", (_x(6), _x(6, seed=1)))
    for a, b in (
        ((4, 6), (6, 8)),
        ((2, 4, 6), (6, 8)),
        ((2, 1, 4, 6), (4, 6, 8)),
        ((6,), (2, 6, 8)),
        ((2, 4, 6), (6,)),
    ):
        yield Example("matmul", (_x(*a), _x(*b, seed=1)))
    yield Example("linear", (_x(2, 4, 6), _x(8, 6, seed=1), _x(8, seed=2)))
    yield Example("linear", (_x(4, 6), _x(8, 6, seed=1)))
    yield Example("addmm", (_x(8), _x(4, 6, seed=1), _x(6, 8, seed=2)))
    yield Example("addmm", (_x(4, 8), _x(4, 6, seed=1), _x(6, 8, seed=2)))
    yield Example("einsum", ("bik,bkj->bij", [_x(2, 4, 6), _x(2, 6, 8, seed=1)]))
    yield Example("einsum", ("ij,jk", [_x(4, 6), _x(6, 8, seed=1)]))


def _views() -> Iterator[Example]:
    for kind in ("view", "reshape", "_unsafe_view"):
        for shape, target in (
            ((4, 6, 8), [24, 8]),
            ((4, 48), [4, 6, 8]),
            ((4, 6, 8), [4, -1]),
            ((4, 6), [1, 4, 6, 1]),
            ((12, 2), [4, 6]),
        ):
            yield Example(kind, (_x(*shape), target))
    yield Example("_reshape_alias", (_x(4, 6), [24], [1]))
    yield Example("flatten", (_x(2, 4, 6), 0, 1))
    yield Example("unflatten", (_x(4, 12), 1, [4, 3]))
    yield Example("squeeze", (_x(4, 1, 6), 1))
    yield Example("unsqueeze", (_x(4, 6), -1))
    yield Example("view_as", (_x(4, 6), _x(24, seed=1)))
    yield Example("reshape_as", (_x(4, 6), _x(24, seed=1)))
    yield Example("permute", (_x(2, 4, 6), [2, 0, 1]))
    for kind in ("transpose", "swapaxes", "swapdims"):
        yield Example(kind, (_x(2, 4, 6), 1, -1))
    yield Example("t", (_x(4, 6),))
    yield Example("numpy_T", (_x(4, 6),))
    for kind in ("movedim", "moveaxis"):
        yield Example(kind, (_x(2, 4, 6), [0], [2]), overload="intlist")
    yield Example("expand", (_x(4, 1, 6), [2, 4, 5, -1]))
    yield Example("expand_as", (_x(4, 1), _x(4, 6, seed=1)))
    yield Example("broadcast_to", (_x(4, 1), [2, 4, 6]))
    yield Example("repeat", (_x(4, 6), [2, 1, 3]))
    yield Example("tile", (_x(4, 6), [1, 3]))
    yield Example("repeat_interleave", (_x(4, 6), 2, 0), overload="self_int")


def _pieces() -> Iterator[Example]:
    yield Example("select", (_x(2, 4, 6), 1, 2))
    yield Example("slice", (_x(4, 6), 1, 0, 3))
    yield Example("slice", (_x(4, 6), 0, 0, 9223372036854775807))
    yield Example("narrow", (_x(4, 6), 1, 1, 3))
    for kind in ("split", "unsafe_split"):
        yield Example(kind, (_x(4, 6), 2, 1))
    yield Example("split_with_sizes", (_x(4, 6), [1, 5], 1))
    for kind in ("chunk", "unsafe_chunk"):
        yield Example(kind, (_x(4, 6), 2, 0))
    yield Example("tensor_split", (_x(4, 6), 2, 0), overload="sections")
    yield Example("unbind", (_x(3, 4, 6), 0))
    for kind in ("cat", "concat"):
        yield Example(kind, ([_x(4, 6), _x(4, 2, seed=1)], -1))
    yield Example("stack", ([_x(4, 6), _x(4, 6, seed=1)], 1))
    yield Example("select_scatter", (_x(4, 6), _x(4, seed=1), 1, 2))
    yield Example("slice_scatter", (_x(4, 6), _x(4, 3, seed=1), 1, 0, 3))
    yield Example("flip", (_x(4, 6), [1]))
    yield Example("roll", (_x(4, 6), [2], [0]))
    yield Example("pad", (_x(4, 6), [1, 2]))
    yield Example("constant_pad_nd", (_x(2, 4, 6), [1, 0, 0, 2], 3.0))
    for kind in ("tril", "triu"):
        yield Example(kind, (_x(4, 6, 6),))
    yield Example("cumsum", (_x(4, 6), 1))


def _reductions() -> Iterator[Example]:
    x = _x(4, 6, 8)
    for kind in ("sum", "mean"):
        yield Example(kind, (x,))
        yield Example(kind, (x, [1]))
        yield Example(kind, (x, [0, -1], True))
    for kind in ("amax", "amin", "logsumexp", "var", "std", "var_mean"):
        yield Example(kind, (x, [1]))
    for kind in ("max", "min", "median", "prod", "any", "all", "argmax", "argmin"):
        yield Example(kind, (x, 1))
    for kind in ("max", "prod", "argmax"):
        yield Example(kind, (x,))
    for kind in ("norm", "linalg_vector_norm"):
        yield Example(kind, (x, 2, [1]))
    for kind in ("sort", "argsort", "cummax", "cumprod", "logcumsumexp"):
        yield Example(kind, (x, 1))
    yield Example("topk", (x, 3, 1))


def _lookups() -> Iterator[Example]:
    yield Example("embedding", (_x(9, 6), _n(9, 4, 5)))
    yield Example("embedding", (_x(9, 6), _n(9, 4, 5), 3))
    bags = (_x(9, 6), _n(9, 8), torch.tensor([0, 3, 4, 6]))
    yield Example("embedding_bag", bags)
    yield Example("_embedding_bag", bags)
    yield Example("_embedding_bag_forward_only", bags, grads=0)
    yield Example("index_select", (_x(4, 6), 1, _n(6, 5)))
    yield Example("gather", (_x(4, 6), 1, _n(6, 4, 3)))
    yield Example("take_along_dim", (_x(4, 6), _n(6, 4, 3), 1))
    yield Example("scatter", (_x(4, 6), 1, _n(6, 4, 1), _x(4, 1, seed=1)))
    yield Example("scatter_add", (_x(4, 6), 1, _n(6, 4, 3), _x(4, 3, seed=1)))
    yield Example("index_add", (_x(4, 6), 1, _n(6, 3), _x(4, 3, seed=1)))
    yield Example("index_copy", (_x(4, 6), 1, torch.tensor([0, 2, 5]), _x(4, 3, seed=1)))
    yield Example("index", (_x(4, 6, 8), [None, _n(6, 5)]))
    yield Example("index", (_x(4, 6, 8), [_n(4, 5), _n(6, 5)]))
    yield Example("index", (_x(4, 6, 8), [_n(4, 5), None, _n(8, 5)]))
    yield Example("one_hot", (_n(7, 4, 6), 7))
    yield Example("bucketize", (_x(4, 6), _x(5, seed=1).sort().values))


def _normalizations() -> Iterator[Example]:
    for kind in ("layer_norm", "native_layer_norm"):
        yield Example(kind, (_x(2, 4, 6), [6], _x(6, seed=1), _x(6, seed=2), 1e-5))
    yield Example("rms_norm", (_x(2, 4, 6), [6], _x(6, seed=1), 1e-6))
    yield Example("_fused_rms_norm", (_x(2, 4, 6), [6], _x(6, seed=1), 1e-6))
    for kind in SOFTMAX:
        yield Example(
            kind, (_x(4, 6, 8), 1, *([False] if kind in ("_softmax", "_log_softmax") else []))
        )
    yield Example("group_norm", (_x(4, 6, 8), 3, _x(6, seed=1), _x(6, seed=2)))
    given = (_x(6, seed=1), _x(6, seed=2), _x(6, seed=3), _x(6, seed=4))
    yield Example("batch_norm", (_x(4, 6, 8), *given, False, 0.1, 1e-5, False), grads=3)
    yield Example("_native_batch_norm_legit_no_training", (_x(4, 6, 8), *given, 0.1, 1e-5), grads=3)


def _attention() -> Iterator[Example]:
    query = _x(2, 4, 5, 6)
    key = _x(2, 4, 7, 6, seed=1)
    value = _x(2, 4, 7, 8, seed=2)
    kind = "scaled_dot_product_attention"
    yield Example(kind, (query, key, value))
    yield Example(kind, (query, key, value, _b(5, 7) | (torch.arange(7) == 0)))
    yield Example(kind, (query, key, value, _x(2, 1, 5, 7, seed=3)))
    yield Example(kind, (query, key[:, :, :5], value[:, :, :5], None, 0.0, True))
    yield Example(kind, (query, key[:, :2], value[:, :2]), {"enable_gqa": True})
    yield Example(kind, (query, key, value, None, 0.4))


def _convolutions() -> Iterator[Example]:
    x1 = _x(2, 4, 8)
    x2 = _x(2, 4, 8, 8)
    x3 = _x(2, 4, 6, 6, 6)
    yield Example("conv1d", (x1, _x(6, 4, 3, seed=1), _x(6, seed=2)))
    yield Example("conv2d", (x2, _x(6, 4, 3, 3, seed=1), _x(6, seed=2), [2, 2], [1, 1]))
    yield Example("conv2d", (x2, _x(8, 2, 1, 1, seed=1), _x(8, seed=2), [1, 1], [0, 0], [1, 1], 2))
    yield Example("conv3d", (x3, _x(6, 4, 2, 2, 2, seed=1)))
    yield Example(
        "convolution",
        (x2, _x(6, 4, 3, 3, seed=1), _x(6, seed=2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    )
    yield Example(
        "convolution", (x2, _x(4, 1, 3, 3, seed=1), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    )
    for dims, x in ((1, x1), (2, x2), (3, x3)):
        yield Example(f"max_pool{dims}d", (x, [2] * dims))
        yield Example(f"avg_pool{dims}d", (x, [2] * dims))
        yield Example(f"adaptive_avg_pool{dims}d", (x, [2] * dims))
    yield Example("_adaptive_avg_pool2d", (x2, [2, 2]))
    yield Example("adaptive_max_pool2d", (x2, [2, 2]))
    yield Example("max_pool2d_with_indices", (x2, [2, 2]))
    yield Example("upsample_nearest2d", (x2, [16, 16]))
    yield Example("upsample_bilinear2d", (x2, [16, 16], False))
    yield Example("pixel_shuffle", (_x(4, 4, 6, 6), 2))


def _creation() -> Iterator[Example]:
    wide = {"dtype": torch.float64}
    yield Example("full", ([4, 6], 2.0), wide)
    yield Example("ones", ([4, 6],), wide)
    yield Example("zeros", ([4, 6],), wide)
    yield Example("new_full", (_x(3), [4, 6], 2.0))
    yield Example("new_ones", (_x(3), [4, 6]))
    yield Example("new_zeros", (_x(3), [4, 6]))
    yield Example("arange", (6,))
    yield Example("linspace", (0.0, 1.0, 6))
    yield Example("scalar_tensor", (2.0,))
    yield Example("eye", (4,))
    yield Example("tril_indices", (4, 4))
    yield Example("triu_indices", (4, 4))


def _losses() -> Iterator[Example]:
    logits = _x(6, 5)
    target = _n(5, 6)
    for reduction in (0, 1, 2):
        yield Example("cross_entropy_loss", (logits, target, None, reduction))
        yield Example("nll_loss_nd", (logits, target, None, reduction, 3))
        yield Example("nll_loss", (logits, target, None, reduction))
        for kind in ELEMENTWISE:
            between = (
                (None,)
                if kind == "binary_cross_entropy"
                else (None, None)
                if kind.endswith("logits")
                else ()
            )
            yield Example(kind, (_x(4, 6), _x(4, 6, seed=1), *between, reduction), grads=1)
    yield Example(
        "cross_entropy_loss", (_x(4, 5, 6), _x(4, 5, 6, seed=1).softmax(1), None, 2, -100, 0.1)
    )
    yield Example("cross_entropy_loss", (logits, target, _x(5, seed=1), 2, 2), grads=1)
    yield Example("nll_loss2d", (_x(4, 5, 3, 6), _n(5, 4, 3, 6), None, 2))
    yield Example("nll_loss_forward", (logits, target, None, 1, -100))
