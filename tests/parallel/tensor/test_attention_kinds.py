"""
Attentions as libraries write them: weights and arguments by head, heads counted in a configuration,
fused and interleaved q, k and v, latent keys, widths divided by heads, subclasses of linear modules.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.tensor import Strategy, col, heads, replicate, row, strategy_for, vocab
from tests.lib.decoder_model import compare

pytestmark = pytest.mark.torch

TP = Grid(("tp",), (2,))
WIDTH, HEADS, HEAD, ROWS, LENGTH = 16, 4, 4, 3, 5


def mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return attention of ``[rows, heads, length, width]`` as ``[rows, length, width]``."""
    scores = q @ k.transpose(-2, -1)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


class Projected(nn.Module):
    """q, k and v of their own; what subclasses add is by head."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = HEADS, HEAD
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(mix(*self.project(x)))


class Relative(Projected):
    """A bias for each distance and head, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.distances(places[:, None] - places + LENGTH).permute(2, 0, 1)
        return self.o(mix(*self.project(x), bias))


class Sinks(Projected):
    """A weight for each head, as in gpt_oss."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        sink = self.sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        weights = torch.cat([q @ k.transpose(-2, -1), sink], -1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Alibi(nn.Module):
    """q, k and v of each head side by side, and a bias ``[rows x heads, ...]``, as in bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, alibi: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(x).view(rows, length, self.num_heads, 3, self.head_dim)
        q, k, v = (qkv[..., i, :].transpose(1, 2) for i in range(3))
        assert alibi is not None
        # heads without rows: a number that is divided by heads, but is no width
        assert alibi.shape[0] // self.num_heads == rows
        return self.o(mix(q, k, v, alibi.view(rows, self.num_heads, 1, length)))


class Counted(nn.Module):
    """One matrix, whose parts are counted by the configuration that all modules share (phi3)."""

    def __init__(self, kv: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=kv, name="x")
        self.num_key_value_heads, self.head_dim = kv, HEAD
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv) * HEAD)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.name == "x"
        shape = (*x.shape[:2], -1, self.head_dim)
        first = self.config.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(x).split([first, kv, kv], -1)
        )
        times = q.shape[1] // k.shape[1]
        return self.o(mix(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)))


class Latent(nn.Module):
    """Keys and values from a narrow layer, a part of the keys shared by all heads (deepseek)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.narrow, self.shared = HEADS, 5, 2
        self.q = nn.Linear(WIDTH, HEADS * (HEAD + self.shared))
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, self.narrow + self.shared), nn.LayerNorm(5)
        self.kv_b, self.o = nn.Linear(self.narrow, HEADS * (HEAD + 3)), nn.Linear(3 * HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        narrow, shared = self.kv_a(x).split([self.narrow, self.shared], -1)
        k, v = (
            self.kv_b(self.kv_norm(narrow))
            .view(*x.shape[:2], -1, HEAD + 3)
            .transpose(1, 2)
            .split([HEAD, 3], -1)
        )
        q = self.q(x).view(*x.shape[:2], -1, HEAD + self.shared).transpose(1, 2)
        shared = shared.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        return self.o(mix(q, torch.cat([k, shared], -1), v))


class Divided(nn.Module):
    """The width of a head is that of the input, divided by the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, d = x.shape
        h = self.heads
        q, k, v = (
            layer(x).view(rows, length, -1, d // h).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        assert d % h == 0
        return self.o(mix(q / math.sqrt(d / self.heads), k, v))


class OwnProduct(nn.Linear):
    """A linear module that writes its product out, as falcon's does."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


class ScaledEmbedding(nn.Embedding):
    """Rows times a number, as in bart and gemma."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class OwnClasses(nn.Module):
    """Subclasses of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = ScaledEmbedding(7, WIDTH, padding_idx=5)
        self.up, self.down = OwnProduct(WIDTH, 10), OwnProduct(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0] * 100).long().abs() % 7
        return x + self.down(self.up(self.emb(ids)).tanh())


PROJECTED = {"a": heads("tp"), "a.[qkv]": col("tp"), "a.o": row("tp")}
FUSED = {"a": heads("tp"), "a.o": row("tp")}
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "relative": (Relative, (), {**PROJECTED, "a.distances": col("tp")}),
    "sinks": (Sinks, (), {**PROJECTED, "a.sinks": col("tp")}),
    "alibi": (
        Alibi,
        (),
        {
            "a": heads("tp", inputs={"alibi": 0}),
            "a.qkv": col("tp", blocks=(3 * WIDTH,)),
            "a.o": row("tp"),
        },
    ),
    "counted": (Counted, (2,), {**FUSED, "a.qkv": col("tp", blocks=(16, 8, 8))}),
    "one key": (Counted, (1,), {**FUSED, "a.qkv": col("tp", blocks=(16, 4, 4))}),
    "latent": (
        Latent,
        (),
        {**FUSED, "a.q|a.kv_b": col("tp"), "a.kv_a|a.kv_norm": replicate("tp")},
    ),
    "divided": (Divided, (), PROJECTED),
    "classes": (
        OwnClasses,
        (),
        {"a.emb": vocab("tp"), "a.up": col("tp"), "a.down": row("tp")},
    ),
}


class Around(nn.Module):
    """A module, between two that stay on every rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        made, sizes, _ = KINDS[kind]
        self.before, self.a, self.after = nn.Linear(WIDTH, WIDTH), made(*sizes), nn.Linear(WIDTH, 2)
        self.takes_alibi = made is Alibi

    def forward(self, x: Tensor) -> Tensor:
        more = {}
        if self.takes_alibi:
            more["alibi"] = torch.arange(len(x) * HEADS * LENGTH).view(-1, 1, LENGTH) * 0.01
        return self.after(self.a(self.before(x), **more))


def equal() -> list[str]:
    """Compare each kind with its unsharded self; return the kinds."""
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    for kind, (_, _, rules) in KINDS.items():
        model = Around(kind).double()
        try:
            compare(model, Strategy(rules), TP, x, lambda model, x: model(x).square().sum())
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
    return list(KINDS)


def test_attentions_of_libraries_equal_the_whole(worlds: Any) -> None:
    assert worlds(2).run(equal)[0] == list(KINDS)


# ---- refusals ---------------------------------------------------------------


class FullWidth(Projected):
    """Reshapes its result to the full width."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(mix(*self.project(x)).view(x.shape))


def reshape_to_full_width() -> str:
    model = nn.ModuleDict({"a": FullWidth()})
    from tests.lib.decoder_model import axes_of

    Strategy(PROJECTED).apply(model, axes_of(TP))
    try:
        model["a"](torch.randn(ROWS, LENGTH, WIDTH))
    except UsageError as error:
        return str(error)
    return ""


def test_a_view_of_the_full_width_names_the_attention(worlds: Any) -> None:
    text = worlds(2).run(reshape_to_full_width)[0]
    assert "Strategy, a: its forward does not compute with 2 times fewer heads" in text
    assert "divide=" in text


class Doubled(nn.Embedding):
    """Not a row for each id."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(ids).mean(0)


def test_mistakes() -> None:
    def mistake(module: nn.Module, rules: dict[str, Any]) -> str:
        model = nn.ModuleDict({"a": module, "b": nn.Linear(4, 4)})
        with pytest.raises(UsageError) as caught:
            Strategy(rules).plan(model, TP)
        return str(caught.value)

    assert "a.sinks: it is a weight outside of an attention" in mistake(
        Sinks(), {"a.sinks": col("tp")}
    )
    assert "a.sinks: it is not tied to a weight of a head" in mistake(
        Sinks(), {"a.sinks": vocab("tp"), "b": vocab("tp")}
    )
    relative = Relative()
    relative.distances = nn.Embedding(4, 6)
    assert "a.distances: its size of 6 must be a multiple of 4 heads" in mistake(
        relative, {**PROJECTED, "a.distances": col("tp")}
    )
    assert "blocks=(16, 4, 4)" in mistake(Counted(1), {**FUSED, "a.qkv": col("tp", blocks=(24,))})
    assert "a: Doubled overrides forward" in mistake(Doubled(4, 4), {"a": vocab("tp")})


# ---- presets ----------------------------------------------------------------


def _named(model_type: str, attention: nn.Module, **config: Any) -> nn.Module:
    """Return a model with the names of transformers, a configuration, and no library."""
    layer = nn.Module()
    layer.self_attn, layer.mlp = attention, nn.Module()
    layer.mlp.gate_up_proj, layer.mlp.down_proj = nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(8, WIDTH)
    model.model.layers = nn.ModuleList([layer])
    model.lm_head = nn.Linear(WIDTH, 8, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.base_model_prefix = "model"
    model.config = SimpleNamespace(model_type=model_type, **config)
    return model


def _lines(model: nn.Module) -> str:
    return "\n".join(strategy_for(model).plan(model, TP).lines())


def test_a_known_model_type() -> None:
    attention = Counted()
    attention.qkv_proj, attention.o_proj = attention.qkv, attention.o
    del attention.qkv, attention.o
    counts = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "hidden_size": WIDTH}
    model = _named("phi3", attention, **counts)
    assert _lines(model).splitlines() == [
        "vocabulary over tp: model.embed_tokens, lm_head",
        "heads over tp: model.layers.0.self_attn",
        "columns over tp: model.layers.0.self_attn.qkv_proj, model.layers.0.mlp.gate_up_proj",
        "rows over tp: model.layers.0.self_attn.o_proj, model.layers.0.mlp.down_proj",
    ]
    with pytest.raises(UsageError, match="sequence=True is not known for phi3"):
        strategy_for(model, sequence=True)


def test_the_plan_of_transformers_is_translated() -> None:
    """Heads, ties, weights by head and what the plan leaves out get their styles."""
    attention = Sinks()
    attention.k_norm = nn.LayerNorm(HEAD)
    plan = {
        "layers.*.self_attn.q": "colwise",
        "layers.*.self_attn.k": "colwise",
        "layers.*.self_attn.v": "colwise",
        "layers.*.self_attn.o": "rowwise",
        "layers.*.mlp.gate_up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    }
    model = _named("new_kind", attention, base_model_tp_plan=plan)
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    assert _lines(model).splitlines() == [
        "vocabulary over tp: model.embed_tokens, lm_head",
        "heads over tp: model.layers.0.self_attn",
        "columns over tp: model.layers.0.self_attn.q, model.layers.0.self_attn.k,"
        " model.layers.0.self_attn.v, model.layers.0.self_attn.sinks",
        "rows over tp: model.layers.0.self_attn.o, model.layers.0.mlp.down_proj",
        "replicated, gradients summed over tp: model.layers.0.self_attn.k_norm",
        "columns over tp, gathered: model.layers.0.mlp.gate_up_proj",
    ]
    model.config.base_model_tp_plan = {"layers.*.self_attn.q": "diagonal"}
    with pytest.raises(UsageError, match="the style 'diagonal', which is not known here"):
        strategy_for(model)
