"""Examples of every kind of operator with a rule. The rule checker uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.parallel.operators.rules.losses import ELEMENTWISE_LOSSES
from pdrun.parallel.operators.rules.normalization import SOFTMAX_KINDS
from pdrun.parallel.operators.rules.pointwise import BROADCAST_KINDS, UNARY_KINDS


@dataclass(frozen=True)
class OperatorExample:
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
        """The function to call."""
        if self.kind == "grouped_mm_fallback":
            return _multiply_groups
        library = torch.ops.pdrun if self.kind in ("constrain", "stop") else torch.ops.aten
        packet = getattr(library, self.kind)
        return getattr(packet, self.overload) if self.overload else packet


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return (
        torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.8
        + 0.1
    )


def _integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _booleans(*shape: int) -> torch.Tensor:
    return _floats(*shape, seed=9) > 0.5


_EXTRA_ARGS: dict[str, tuple[Any, ...]] = {
    "clamp": (0.2, 0.7),
    "clip": (0.2, 0.7),
    "clamp_max": (0.5,),
    "clamp_min": (0.5,),
    "threshold": (0.4, 0.1),
    "full_like": (2.0,),
}
_INTEGER_KINDS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__", "__or__")
_TERNARY_KINDS = ("addcdiv", "addcmul", "lerp")


def all_examples() -> Iterator[OperatorExample]:
    """Yield all examples; several of one kind if shapes or arguments matter."""
    for part in (
        _pointwise_examples,
        _matrix_examples,
        _view_examples,
        _slicing_examples,
        _reduction_examples,
        _lookup_examples,
    ):
        yield from part()
    for part in (
        _normalization_examples,
        _attention_examples,
        _convolution_examples,
        _creation_examples,
        _loss_examples,
        _group_examples,
        _recurrent_examples,
    ):
        yield from part()


def _pointwise_examples() -> Iterator[OperatorExample]:
    for kind in UNARY_KINDS:
        x = _floats(4, 6)
        if kind in _INTEGER_KINDS:
            x = _integers(5, 4, 6)
        elif kind == "acosh":
            x = x + 1
        yield OperatorExample(kind, (x, *_EXTRA_ARGS.get(kind, ())))
    for kind in BROADCAST_KINDS:
        if kind in _INTEGER_KINDS:
            yield OperatorExample(kind, (_integers(8, 4, 6), _integers(8, 6, seed=1)))
        elif kind in _TERNARY_KINDS:
            yield OperatorExample(
                kind, (_floats(4, 6), _floats(4, 6, seed=1), _floats(4, 1, seed=2))
            )
        else:
            yield OperatorExample(kind, (_floats(4, 6), _floats(6, seed=1)))
    for kind in ("add", "sub", "mul", "multiply", "div", "divide", "true_divide"):
        yield OperatorExample(kind, (_floats(2, 4, 6), _floats(4, 1, seed=1)))
        yield OperatorExample(kind, (_floats(2, 4, 6), _floats(2, 4, 6, seed=1)))
        yield OperatorExample(kind, (_floats(4, 6), 3))
    for kind in ("clone", "neg", "negative", "positive", "real", "detach"):
        yield OperatorExample(kind, (_floats(4, 6),))
    yield OperatorExample("constrain", (_floats(4, 6), "[[[], []], []]"))
    yield OperatorExample("stop", (_floats(4, 6),))
    yield OperatorExample("to", (_floats(4, 6), torch.float32), overload="dtype")
    yield OperatorExample("_to_copy", (_floats(4, 6),), {"dtype": torch.float32})
    yield OperatorExample("type_as", (_floats(4, 6), _floats(1, seed=1)))
    for weight in (_floats(6), _floats(1)):
        yield OperatorExample("prelu", (_floats(4, 6, 8) - 0.5, weight))
    yield OperatorExample("where", (_booleans(4, 6), _floats(4, 6), _floats(6, seed=1)))
    yield OperatorExample("masked_fill", (_floats(4, 6), _booleans(1, 6), 0))
    yield OperatorExample("masked_fill", (_floats(4, 6), _booleans(4, 1), float("-inf")))
    yield OperatorExample("fill", (_floats(4, 6), torch.tensor(2.0, dtype=torch.float64)))
    yield OperatorExample("copy", (_floats(4, 6), _floats(1, 6, seed=1)))
    for kind in ("dropout", "native_dropout"):
        yield OperatorExample(kind, (_floats(4, 6), 0.4, True))
        yield OperatorExample(kind, (_floats(4, 6), 0.4, False))


def _matrix_examples() -> Iterator[OperatorExample]:
    yield OperatorExample("mm", (_floats(4, 6), _floats(6, 8, seed=1)))
    yield OperatorExample("bmm", (_floats(4, 4, 6), _floats(4, 6, 8, seed=1)))
    yield OperatorExample("mv", (_floats(4, 6), _floats(6, seed=1)))
    yield OperatorExample("dot", (_floats(6), _floats(6, seed=1)))
    for a, b in (
        ((4, 6), (6, 8)),
        ((2, 4, 6), (6, 8)),
        ((2, 1, 4, 6), (4, 6, 8)),
        ((6,), (2, 6, 8)),
        ((2, 4, 6), (6,)),
    ):
        yield OperatorExample("matmul", (_floats(*a), _floats(*b, seed=1)))
    yield OperatorExample("linear", (_floats(2, 4, 6), _floats(8, 6, seed=1), _floats(8, seed=2)))
    yield OperatorExample("linear", (_floats(4, 6), _floats(8, 6, seed=1)))
    yield OperatorExample("addmm", (_floats(8), _floats(4, 6, seed=1), _floats(6, 8, seed=2)))
    yield OperatorExample("addmm", (_floats(4, 8), _floats(4, 6, seed=1), _floats(6, 8, seed=2)))
    yield OperatorExample("einsum", ("bik,bkj->bij", [_floats(2, 4, 6), _floats(2, 6, 8, seed=1)]))
    yield OperatorExample("einsum", ("ij,jk", [_floats(4, 6), _floats(6, 8, seed=1)]))


def _view_examples() -> Iterator[OperatorExample]:
    for kind in ("view", "reshape", "_unsafe_view"):
        for shape, target in (
            ((4, 6, 8), [24, 8]),
            ((4, 48), [4, 6, 8]),
            ((4, 6, 8), [4, -1]),
            ((4, 6), [1, 4, 6, 1]),
            ((12, 2), [4, 6]),
        ):
            yield OperatorExample(kind, (_floats(*shape), target))
    yield OperatorExample("_reshape_alias", (_floats(4, 6), [24], [1]))
    yield OperatorExample("flatten", (_floats(2, 4, 6), 0, 1))
    yield OperatorExample("unflatten", (_floats(4, 12), 1, [4, 3]))
    yield OperatorExample("squeeze", (_floats(4, 1, 6), 1))
    yield OperatorExample("unsqueeze", (_floats(4, 6), -1))
    yield OperatorExample("view_as", (_floats(4, 6), _floats(24, seed=1)))
    yield OperatorExample("reshape_as", (_floats(4, 6), _floats(24, seed=1)))
    yield OperatorExample("permute", (_floats(2, 4, 6), [2, 0, 1]))
    for kind in ("transpose", "swapaxes", "swapdims"):
        yield OperatorExample(kind, (_floats(2, 4, 6), 1, -1))
    yield OperatorExample("t", (_floats(4, 6),))
    yield OperatorExample("numpy_T", (_floats(4, 6),))
    for kind in ("movedim", "moveaxis"):
        yield OperatorExample(kind, (_floats(2, 4, 6), [0], [2]), overload="intlist")
    yield OperatorExample("expand", (_floats(4, 1, 6), [2, 4, 5, -1]))
    yield OperatorExample("expand_as", (_floats(4, 1), _floats(4, 6, seed=1)))
    yield OperatorExample("broadcast_to", (_floats(4, 1), [2, 4, 6]))
    yield OperatorExample("repeat", (_floats(4, 6), [2, 1, 3]))
    yield OperatorExample("tile", (_floats(4, 6), [1, 3]))
    yield OperatorExample("repeat_interleave", (_floats(4, 6), 2, 0), overload="self_int")


def _slicing_examples() -> Iterator[OperatorExample]:
    yield OperatorExample("select", (_floats(2, 4, 6), 1, 2))
    yield OperatorExample("slice", (_floats(4, 6), 1, 0, 3))
    yield OperatorExample("slice", (_floats(4, 6), 0, 0, 9223372036854775807))
    yield OperatorExample("narrow", (_floats(4, 6), 1, 1, 3))
    for kind in ("split", "unsafe_split"):
        yield OperatorExample(kind, (_floats(4, 6), 2, 1))
    yield OperatorExample("split_with_sizes", (_floats(4, 6), [1, 5], 1))
    for kind in ("chunk", "unsafe_chunk"):
        yield OperatorExample(kind, (_floats(4, 6), 2, 0))
    yield OperatorExample("tensor_split", (_floats(4, 6), 2, 0), overload="sections")
    yield OperatorExample("unbind", (_floats(3, 4, 6), 0))
    for kind in ("cat", "concat"):
        yield OperatorExample(kind, ([_floats(4, 6), _floats(4, 2, seed=1)], -1))
    yield OperatorExample("stack", ([_floats(4, 6), _floats(4, 6, seed=1)], 1))
    yield OperatorExample("select_scatter", (_floats(4, 6), _floats(4, seed=1), 1, 2))
    yield OperatorExample("slice_scatter", (_floats(4, 6), _floats(4, 3, seed=1), 1, 0, 3))
    yield OperatorExample("flip", (_floats(4, 6), [1]))
    yield OperatorExample("roll", (_floats(4, 6), [2], [0]))
    yield OperatorExample("pad", (_floats(4, 6), [1, 2]))
    yield OperatorExample("constant_pad_nd", (_floats(2, 4, 6), [1, 0, 0, 2], 3.0))
    for kind in ("tril", "triu"):
        yield OperatorExample(kind, (_floats(4, 6, 6),))
    yield OperatorExample("cumsum", (_floats(4, 6), 1))
    yield OperatorExample("diff", (_floats(4, 6), 1, 1, _floats(4, 1, seed=1)))
    yield OperatorExample("histc", (_floats(4, 6), 5, 0, 1))


def _reduction_examples() -> Iterator[OperatorExample]:
    x = _floats(4, 6, 8)
    for kind in ("sum", "mean"):
        yield OperatorExample(kind, (x,))
        yield OperatorExample(kind, (x, [1]))
        yield OperatorExample(kind, (x, [0, -1], True))
    for kind in ("amax", "amin", "logsumexp", "var", "std", "var_mean"):
        yield OperatorExample(kind, (x, [1]))
    for kind in ("max", "min", "median", "prod", "any", "all", "argmax", "argmin"):
        yield OperatorExample(kind, (x, 1))
    for kind in ("max", "prod", "argmax"):
        yield OperatorExample(kind, (x,))
    for kind in ("norm", "linalg_vector_norm"):
        yield OperatorExample(kind, (x, 2, [1]))
    for kind in ("sort", "argsort", "cummax", "cumprod", "logcumsumexp"):
        yield OperatorExample(kind, (x, 1))
    yield OperatorExample("topk", (x, 3, 1))


def _lookup_examples() -> Iterator[OperatorExample]:
    yield OperatorExample("embedding", (_floats(9, 6), _integers(9, 4, 5)))
    yield OperatorExample("embedding", (_floats(9, 6), _integers(9, 4, 5), 3))
    bags = (_floats(9, 6), _integers(9, 8), torch.tensor([0, 3, 4, 6]))
    yield OperatorExample("embedding_bag", bags)
    yield OperatorExample("_embedding_bag", bags)
    yield OperatorExample("_embedding_bag_forward_only", bags, grads=0)
    yield OperatorExample("index_select", (_floats(4, 6), 1, _integers(6, 5)))
    yield OperatorExample("gather", (_floats(4, 6), 1, _integers(6, 4, 3)))
    yield OperatorExample("take_along_dim", (_floats(4, 6), _integers(6, 4, 3), 1))
    yield OperatorExample("scatter", (_floats(4, 6), 1, _integers(6, 4, 1), _floats(4, 1, seed=1)))
    yield OperatorExample(
        "scatter_add", (_floats(4, 6), 1, _integers(6, 4, 3), _floats(4, 3, seed=1))
    )
    yield OperatorExample("index_add", (_floats(4, 6), 1, _integers(6, 3), _floats(4, 3, seed=1)))
    yield OperatorExample(
        "index_copy", (_floats(4, 6), 1, torch.tensor([0, 2, 5]), _floats(4, 3, seed=1))
    )
    yield OperatorExample("index", (_floats(4, 6, 8), [None, _integers(6, 5)]))
    yield OperatorExample("index", (_floats(4, 6, 8), [_integers(4, 5), _integers(6, 5)]))
    yield OperatorExample("index", (_floats(4, 6, 8), [_integers(4, 5), None, _integers(8, 5)]))
    yield OperatorExample("one_hot", (_integers(7, 4, 6), 7))
    yield OperatorExample("bucketize", (_floats(4, 6), _floats(5, seed=1).sort().values))


def _normalization_examples() -> Iterator[OperatorExample]:
    for kind in ("layer_norm", "native_layer_norm"):
        yield OperatorExample(
            kind, (_floats(2, 4, 6), [6], _floats(6, seed=1), _floats(6, seed=2), 1e-5)
        )
    yield OperatorExample("rms_norm", (_floats(2, 4, 6), [6], _floats(6, seed=1), 1e-6))
    yield OperatorExample("_fused_rms_norm", (_floats(2, 4, 6), [6], _floats(6, seed=1), 1e-6))
    for kind in SOFTMAX_KINDS:
        yield OperatorExample(
            kind, (_floats(4, 6, 8), 1, *([False] if kind in ("_softmax", "_log_softmax") else []))
        )
    yield OperatorExample(
        "group_norm", (_floats(4, 6, 8), 3, _floats(6, seed=1), _floats(6, seed=2))
    )
    given = (_floats(6, seed=1), _floats(6, seed=2), _floats(6, seed=3), _floats(6, seed=4))
    yield OperatorExample(
        "batch_norm", (_floats(4, 6, 8), *given, False, 0.1, 1e-5, False), grads=3
    )
    yield OperatorExample(
        "_native_batch_norm_legit_no_training", (_floats(4, 6, 8), *given, 0.1, 1e-5), grads=3
    )


def _attention_examples() -> Iterator[OperatorExample]:
    query = _floats(2, 4, 5, 6)
    key = _floats(2, 4, 7, 6, seed=1)
    value = _floats(2, 4, 7, 8, seed=2)
    kind = "scaled_dot_product_attention"
    yield OperatorExample(kind, (query, key, value))
    yield OperatorExample(kind, (query, key, value, _booleans(5, 7) | (torch.arange(7) == 0)))
    yield OperatorExample(kind, (query, key, value, _floats(2, 1, 5, 7, seed=3)))
    yield OperatorExample(kind, (query, key[:, :, :5], value[:, :, :5], None, 0.0, True))
    yield OperatorExample(kind, (query, key[:, :2], value[:, :2]), {"enable_gqa": True})
    yield OperatorExample(kind, (query, key, value, None, 0.4))


def _convolution_examples() -> Iterator[OperatorExample]:
    x1 = _floats(2, 4, 8)
    x2 = _floats(2, 4, 8, 8)
    x3 = _floats(2, 4, 6, 6, 6)
    yield OperatorExample("conv1d", (x1, _floats(6, 4, 3, seed=1), _floats(6, seed=2)))
    yield OperatorExample(
        "conv2d", (x2, _floats(6, 4, 3, 3, seed=1), _floats(6, seed=2), [2, 2], [1, 1])
    )
    yield OperatorExample(
        "conv2d", (x2, _floats(8, 2, 1, 1, seed=1), _floats(8, seed=2), [1, 1], [0, 0], [1, 1], 2)
    )
    yield OperatorExample("conv3d", (x3, _floats(6, 4, 2, 2, 2, seed=1)))
    yield OperatorExample(
        "convolution",
        (
            x2,
            _floats(6, 4, 3, 3, seed=1),
            _floats(6, seed=2),
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
        ),
    )
    yield OperatorExample(
        "convolution",
        (x2, _floats(4, 1, 3, 3, seed=1), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    )
    for dims, x in ((1, x1), (2, x2), (3, x3)):
        yield OperatorExample(f"max_pool{dims}d", (x, [2] * dims))
        yield OperatorExample(f"avg_pool{dims}d", (x, [2] * dims))
        yield OperatorExample(f"adaptive_avg_pool{dims}d", (x, [2] * dims))
    yield OperatorExample("_adaptive_avg_pool2d", (x2, [2, 2]))
    yield OperatorExample("adaptive_max_pool2d", (x2, [2, 2]))
    yield OperatorExample("max_pool2d_with_indices", (x2, [2, 2]))
    yield OperatorExample("upsample_nearest2d", (x2, [16, 16]))
    yield OperatorExample("upsample_bilinear2d", (x2, [16, 16], False))
    yield OperatorExample("pixel_shuffle", (_floats(4, 4, 6, 6), 2))


def _creation_examples() -> Iterator[OperatorExample]:
    wide = {"dtype": torch.float64}
    yield OperatorExample("full", ([4, 6], 2.0), wide)
    yield OperatorExample("ones", ([4, 6],), wide)
    yield OperatorExample("zeros", ([4, 6],), wide)
    yield OperatorExample("new_full", (_floats(3), [4, 6], 2.0))
    yield OperatorExample("new_ones", (_floats(3), [4, 6]))
    yield OperatorExample("new_zeros", (_floats(3), [4, 6]))
    yield OperatorExample("arange", (6,))
    yield OperatorExample("linspace", (0.0, 1.0, 6))
    yield OperatorExample("scalar_tensor", (2.0,))
    yield OperatorExample("eye", (4,))
    yield OperatorExample("tril_indices", (4, 4))
    yield OperatorExample("triu_indices", (4, 4))


def _multiply_groups(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what the transformers library computes where torch has no grouped product."""
    parts = rows.tensor_split([int(end) for end in ends[:-1]])
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _group_examples() -> Iterator[OperatorExample]:
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    narrow = _floats(6, 4), _floats(3, 4, 5, seed=1)
    yield OperatorExample("grouped_mm_fallback", (*narrow, ends))
    wide = _floats(6, 16).float(), _floats(3, 16, 16, seed=1).float()
    yield OperatorExample("_grouped_mm", (*wide, ends))
    matrices = _floats(2, 4, 3), _floats(2, 3, 6, seed=1)
    yield OperatorExample(
        "baddbmm", (_floats(2, 1, 6, seed=2), *matrices), {"beta": 0.5, "alpha": 2.0}
    )
    places = torch.tensor([2, 0])
    yield OperatorExample("index_put", (_floats(4, 6), [places], _floats(2, 6, seed=1)))
    yield OperatorExample("index_put", (_floats(4, 6), [None, places], _floats(1, seed=1), True))
    yield OperatorExample("index_put", (_floats(4, 6), [_booleans(4, 6)], _floats(1, seed=1)[0]))


def _recurrent_examples() -> Iterator[OperatorExample]:
    x = _floats(4, 3, 5)
    options = (True, 2, 0.0, False, False)
    for kind, gates in (("rnn_tanh", 1), ("rnn_relu", 1), ("gru", 3), ("lstm", 4)):
        weights = []
        for layer in range(2):
            sizes = ((5, 2)[layer], 2)
            weights += [_floats(2 * gates, size, seed=layer + 1) - 0.5 for size in sizes]
            weights += [_floats(2 * gates, seed=layer + 3) - 0.5 for _ in sizes]
        for batch_first, rows in ((True, 4), (False, 3)):
            state = _floats(2, rows, 2, seed=5)
            start = [state, state * 0.5] if kind == "lstm" else state
            yield OperatorExample(kind, (x, start, weights, *options, batch_first), {}, "input")


def _loss_examples() -> Iterator[OperatorExample]:
    logits = _floats(6, 5)
    target = _integers(5, 6)
    for reduction in (0, 1, 2):
        yield OperatorExample("cross_entropy_loss", (logits, target, None, reduction))
        yield OperatorExample("nll_loss_nd", (logits, target, None, reduction, 3))
        yield OperatorExample("nll_loss", (logits, target, None, reduction))
        for kind in ELEMENTWISE_LOSSES:
            weights: tuple[None, ...] = ()
            if kind == "binary_cross_entropy":
                weights = (None,)
            elif kind == "binary_cross_entropy_with_logits":
                weights = (None, None)
            yield OperatorExample(
                kind, (_floats(4, 6), _floats(4, 6, seed=1), *weights, reduction), grads=1
            )
    yield OperatorExample(
        "cross_entropy_loss",
        (_floats(4, 5, 6), _floats(4, 5, 6, seed=1).softmax(1), None, 2, -100, 0.1),
    )
    yield OperatorExample("cross_entropy_loss", (logits, target, _floats(5, seed=1), 2, 2), grads=1)
    yield OperatorExample("nll_loss2d", (_floats(4, 5, 3, 6), _integers(5, 4, 3, 6), None, 2))
    yield OperatorExample("nll_loss_forward", (logits, target, None, 1, -100))
