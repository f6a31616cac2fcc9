"""Caches of attention in plain torch: tokens of full sequences, one position at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.inference.infer import infer
from pdrun.parallel.inference.inference_model import InferenceModel
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

WORDS, WIDTH, HEADS, KV_HEADS, PLACES = 41, 32, 4, 2, 40
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def turn(x: Tensor, places: Tensor) -> Tensor:
    """Turn pairs of features by their position; places are ``[rows, length]``."""
    half = x.shape[-1] // 2
    speeds = 0.5 ** torch.arange(half, device=x.device)
    angles = places[:, None, :, None] * speeds
    a, b = x.chunk(2, -1)
    turned = torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
    )
    return turned.type_as(x)


class Attention(nn.Module):
    """Grouped queries and rotary positions; ``mistake`` is what a user can do wrong."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV_HEADS, WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * self.head_dim) for _ in range(2))
        self.cache: Any = pdrun.KVCache()
        self.other: Any = pdrun.KVCache() if mistake == "a cache that is not called" else None

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            each.view(rows, length, -1, self.head_dim).transpose(1, 2)
            for each in (self.wq(x), self.wk(x), self.wv(x))
        )
        places = self.cache.positions(length, x.device)
        if self.mistake == "own positions":
            places = torch.arange(length)[None]
        q, k = turn(q, places), turn(k, places)
        if self.mistake == "the last key":
            k, v = k[:, :, -1:], v[:, :, -1:]
        k, v, mask = self.cache(k, v)
        if self.mistake == "twice":
            self.cache(k, v)
        if self.mistake == "no mask":
            mask = None
        times = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mean(nn.Module):
    """A mean of all tokens before, without a cache."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / 9


class Decoder(nn.Module):
    """Two layers; it notes how many tokens it is called with."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Attention(mistake) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mean = Mean() if mistake == "a mean" else None
        self.lengths: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.lengths.append(ids.shape[1])
        h = self.emb(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + layer(norm(h))
        if self.mean is not None:
            h = h + self.mean(h)
        return self.head(h)


def build(mistake: str = "") -> Decoder:
    torch.manual_seed(4)
    model = Decoder(mistake)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.2)
    return model


def without_caches(model: Decoder) -> Decoder:
    """Return a copy that computes full sequences: its caches are plain modules."""

    class Through(nn.Module):
        def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
            return k, v, None

        def positions(self, length: int, device: Any = None) -> Tensor:
            return torch.arange(length, device=device)[None]

    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.cache = Through()  # type: ignore[union-attr]
    return model


def prompts(rows: int = 4) -> list[list[int]]:
    made = torch.Generator().manual_seed(8)
    ids = torch.randint(0, WORDS, (rows, 9), generator=made).tolist()
    return [row[: 9 - 3 * (number % 3)] for number, row in enumerate(ids)]


def serve(degrees: dict[str, int], **options: Any) -> InferenceModel:
    cut = None
    if degrees.get("tp", 1) > 1:
        cut = pdrun.Strategy(
            {
                "layers.*.w[qkv]": pdrun.col("tp"),
                "layers.*.wo": pdrun.row("tp"),
                "layers.?": pdrun.heads("tp"),
            }
        )
    devices = mesh.make_mesh(**degrees)
    return infer(build(), mesh=devices, strategy=cut, timeout=30.0, max_length=PLACES, **options)


def generate(degrees: dict[str, int], **options: Any) -> Any:
    """Return tokens, the lengths of all calls, bytes of a cache, and what verify found."""
    served = serve(degrees, **options)
    served.model.lengths.clear()
    greedy = served.generate(prompts(), 12)
    lengths = list(served.model.lengths)
    sampled = served.generate(prompts(), 12, **SAMPLED, eos=3, cache=PLACES)
    difference = served.verify(prompts()).max_difference
    return greedy, sampled, lengths, served.memory(rows=4, length=10).cache, difference


def test_tokens_are_those_of_full_sequences_on_any_mesh(worlds: Worlds) -> None:
    """Prompts are of several lengths; after them the model is called with one token."""
    whole = infer(without_caches(build()), max_length=PLACES)
    expected = whole.generate(prompts(), 12), whole.generate(prompts(), 12, **SAMPLED, eos=3)
    *tokens, lengths, cache, difference = generate({})
    assert tuple(tokens) == expected
    assert lengths == [9] + [1] * 11
    assert difference == 0.0
    # rows, places, keys and values, layers, heads, dim, bytes
    assert cache == 4 * 10 * 2 * 2 * KV_HEADS * WIDTH // HEADS * 4
    for degrees in ({"tp": 2}, {"dp": 2}):
        for *found, _, part, off in worlds(2).run(generate, degrees):
            assert tuple(found) == expected
            assert part == cache // 2
            assert off < 1e-5


def test_tokens_in_bf16_and_of_one_long_prompt() -> None:
    served = serve({}, dtype=torch.bfloat16)
    assert served.verify(prompts()).different_rows == ()
    one = [list(range(PLACES - 4))]
    assert len(served.generate(one, 5)[0]) == 5
    with pytest.raises(UsageError, match="need more than the model's 40 positions"):
        served.generate(one, 6)


def test_a_model_with_caches_is_the_same_elsewhere() -> None:
    """In training, and between calls of a served model."""
    model = build()
    ids = torch.tensor([prompts()[0]])
    expected = without_caches(model)(ids)
    assert torch.equal(model(ids), expected)
    served = infer(model, max_length=PLACES)
    served.generate(prompts(), 3)
    assert torch.equal(served(ids), expected)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("own positions", "logits with caches differ from those of full sequences"),
        ("no mask", "logits with caches differ from those of full sequences"),
        ("a mean", "logits with caches differ from those of full sequences"),
        ("twice", "a cache is called twice in one forward"),
        ("the last key", r"keys must be \[2, heads, 5, dim\], got \[2, 2, 1, 8\]"),
        ("a cache that is not called", "forward called 2 of the model's 4 caches"),
    ],
)
def test_mistakes_are_found_before_a_token_is_generated(mistake: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        infer(build(mistake))


def test_it_is_not_compiled() -> None:
    with pytest.raises(UsageError, match="compile=True is not supported for Decoder"):
        infer(build(), compile=True)
