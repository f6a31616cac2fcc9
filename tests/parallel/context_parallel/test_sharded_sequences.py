"""
Plain models on cut sequences: loss and gradients of one process, and what can't be right is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f

import pdrun.parallel.context_parallel.context as context
from pdrun.errors import UsageError
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.rng.shard_region import shard_region
from pdrun.parallel.rng.step_rng import StepRNG
from tests.parallel.comm.test_collectives import axes_of

pytestmark = pytest.mark.torch

VOCABULARY, WIDTH, HEADS = 17, 32, 4


class Block(nn.Module):
    """Causal attention as most models write it, and a feed-forward layer."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.key_heads, self.p = key_heads, 0.0
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * key_heads * WIDTH // HEADS)
        self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 64),
            nn.Linear(64, WIDTH),
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[batch, positions, WIDTH]`` to the same."""
        y = self.norm(x)
        size = WIDTH // HEADS
        q = self.q(y).unflatten(-1, (HEADS, size)).transpose(1, 2)
        k, v = (
            z.unflatten(-1, (self.key_heads, size)).transpose(1, 2) for z in self.kv(y).chunk(2, -1)
        )
        y = f.scaled_dot_product_attention(
            q, k, v, mask, self.p, is_causal=mask is None, enable_gqa=self.key_heads < HEADS
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(f.gelu(self.up(self.second(x))))


class Lm(nn.Module):
    """A language model that takes the first rows of a table of positions, as GPT-2's code does."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 64), persistent=False)
        self.blocks = nn.ModuleList([Block(key_heads) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, positions]`` to logits."""
        here = torch.arange(tokens.shape[1])
        x = (self.wte(tokens) + self.wpe(here)) * self.gain[: tokens.shape[1], None]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class Asks(Lm):
    """The same with positions that it asks pdrun for."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, positions]`` to logits."""
        here = context.positions(tokens.shape[1])
        x = (self.wte(tokens) + self.wpe(here)) * self.gain[here, None]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """torch's own encoder, whose MultiheadAttention calls the function that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, positions]`` to logits; keys whose token is 0 are not seen."""
        return self.head(self.layers(self.wte(tokens), src_key_padding_mask=tokens == 0))


class Cross(Lm):
    """
    The same with attention to something that is not cut: a memory of 5 places, the same for all
    rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.ask = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, positions]`` to logits."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        held = self.memory.expand(len(x), 1, -1, -1)
        x = x + f.scaled_dot_product_attention(self.ask(x).unsqueeze(1), held, held).squeeze(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


TABLES = {"wpe.weight": 0, "gain": 0}
MODELS = {"lm": Lm, "grouped": lambda: Lm(2), "asks": Asks, "encoder": Encoder, "cross": Cross}


def _batch(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(
        1, VOCABULARY, (3, length + 1), generator=torch.Generator().manual_seed(length)
    )
    tokens[1, max(1, length - 2) :] = 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _loss(model: nn.Module, batch: dict[str, Any], mask: Any = None) -> torch.Tensor:
    logits = model(batch["tokens"], mask)
    return f.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def train(
    name: str,
    length: int,
    settings: dict[str, Any],
    recompute: bool = False,
    kind: Any = torch.float64,
) -> None:
    """
    Compute one loss and its gradients on cut sequences, and hold them against those of one process.
    """
    axes = axes_of(Grid(("pp", "dp", "cp", "tp"), (1, 1, torch.distributed.get_world_size(), 1)))
    torch.manual_seed(1)
    model, batch = MODELS[name]().to(kind), _batch(length)
    names = [key for key, _ in model.named_parameters()]
    wanted = _loss(model, batch)
    wanted.backward()
    whole = {key: param.grad.clone() for key, param in model.named_parameters()}
    model.zero_grad()

    if recompute:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda *args, inner=inner: torch.utils.checkpoint.checkpoint(
                inner, *args, use_reentrant=False
            )
    parallel = ContextParallel(**settings)
    assert parallel.apply(model, axes) is model
    part = parallel.part(batch, axes)
    with parallel.patched_attention(axes):
        loss = _loss(model, part)
    with parallel.patched_attention(axes):
        loss.backward()
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if kind == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    )
    torch.testing.assert_close(axes["cp"].all_reduce(loss.detach()), wanted.detach(), **tolerance)
    assert [key for key, _ in model.named_parameters()] == names
    for key, param in model.named_parameters():
        found = axes["cp"].all_reduce(param.grad)
        scale = max(1.0, float(whole[key].abs().max()))
        torch.testing.assert_close(
            found / scale,
            whole[key] / scale,
            msg=lambda text, key=key: f"{key}: {text}",
            **tolerance,
        )
    torch.testing.assert_close(
        _loss(model, batch), wanted
    )  # outside of a run it is the model that it was


@pytest.mark.parametrize(
    ("name", "ranks", "length", "settings"),
    [
        ("lm", 2, 12, {}),
        ("lm", 4, 21, {}),
        ("lm", 4, 21, {"order": "contiguous"}),
        ("lm", 4, 21, {"ulysses": 2}),
        ("lm", 4, 24, {"ulysses": -1}),
        ("grouped", 4, 19, {"ulysses": 2, "order": "contiguous"}),
        ("grouped", 3, 14, {}),
    ],
)
def test_a_plain_model_computes_what_it_does_alone(
    worlds: Any, name: str, ranks: int, length: int, settings: dict[str, Any]
) -> None:
    worlds(ranks).run(train, name, length, {**settings, "tables": TABLES})


def test_recomputation_attends_once_more(worlds: Any) -> None:
    worlds(2).run(train, "lm", 12, {"tables": TABLES}, recompute=True)


def test_fp32(worlds: Any) -> None:
    worlds(2).run(train, "lm", 12, {"tables": TABLES}, kind=torch.float32)


def test_a_model_that_asks_for_positions(worlds: Any) -> None:
    worlds(2).run(train, "asks", 13, {})


def test_attention_to_what_every_rank_has(worlds: Any) -> None:
    worlds(2).run(train, "cross", 12, {"tables": {"wpe.weight": 0}, "elsewhere": True})
    told = worlds(2).failures(train, "cross", 12, {"tables": {"wpe.weight": 0}})
    assert all("attention of 6 queries over 5 keys" in text for _, text in told)


@pytest.mark.parametrize("settings", [{}, {"ulysses": 2}, {"ulysses": -1}])
def test_torchs_encoder_with_a_padding_mask(worlds: Any, settings: dict[str, Any]) -> None:
    """Its mask has one row of this rank's keys: the others' are fetched."""
    worlds(4).run(train, "encoder", 15, settings)


def some_heads(settings: dict[str, Any]) -> None:
    """
    Drop weights of all heads, and of some of them in a region that says so, as tensor parallel
    does.
    """
    axes = axes_of(Grid(("pp", "dp", "cp", "tp"), (1, 1, 2, 1)))
    parallel, thrown = ContextParallel(**settings), StepRNG(5)
    parallel.part(_batch(12), axes)
    q, k, v = torch.randn(
        3, 3, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(axes.rank)
    )

    def attend(low: int, high: int) -> torch.Tensor:
        thrown.begin_forward(1, 0, range(3), torch.device("cpu"))
        with (
            thrown.patched_dropout(),
            parallel.patched_attention(axes),
            shard_region({1: (low, high, 4)}),
        ):
            heads = (x[:, low:high] for x in (q, k, v))
            return f.scaled_dot_product_attention(*heads, dropout_p=0.5, is_causal=True)

    torch.testing.assert_close(torch.cat([attend(0, 2), attend(2, 4)], 1), attend(0, 4))
    assert not torch.equal(attend(0, 4), f.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("settings", [{}, {"ulysses": 2}])
def test_dropout_of_some_heads_is_that_of_all(worlds: Any, settings: dict[str, Any]) -> None:
    worlds(2).run(some_heads, settings)


# ---- refused ----------------------------------------------------------------


def attempt(what: str) -> str:
    """Return what is said to something that can't be right."""
    axes = axes_of(Grid(("pp", "dp", "cp", "tp"), (1, 1, 2, 1)))
    model, batch = Lm(), _batch(12)
    settings: dict[str, Any] = {
        "glob": {"tables": {"*.nowhere": 0}},
        "divide": {"ulysses": 3},
        "short": {"tables": {"short": 0}},
        "dims": {"dims": {"token": 1}},
        "lengths": {"dims": {"tokens": 1, "targets": 0}},
        "order": {"order": "random"},
    }.get(what, {})
    mask = None
    if what == "mask":
        mask = torch.ones(6, 6, dtype=torch.bool)
    if what == "short":
        model.register_buffer("short", torch.zeros(4))
    try:
        parallel = ContextParallel(**settings)
        parallel.apply(model, axes)
        part = parallel.part(
            _batch(1) if what == "few" else {"x": torch.zeros(3)} if what == "flat" else batch, axes
        )
        with parallel.patched_attention(axes):
            if what == "open":
                model.head(model.wte(part["tokens"]))
            elif what == "other":
                f.scaled_dot_product_attention(*[torch.zeros(1, 2, 5, 8)] * 3)
            elif what == "weights":
                nn.MultiheadAttention(8, 2)(*[torch.zeros(6, 1, 8)] * 3)
            elif what == "positions":
                context.positions(12)
            elif what == "short":
                model.short  # noqa: B018
            else:
                _loss(model, part, mask)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("glob", "'*.nowhere' matches no weight and no buffer"),
        ("divide", "ulysses=3 does not divide the 2 ranks along cp"),
        ("order", "order='random'"),
        ("dims", "dims= names what the batch lacks: token"),
        ("lengths", "the batch has no sequence to cut: lengths [3, 12]"),
        ("flat", "no tensor has a dim 1"),
        ("few", "sequences of 1 positions are too short"),
        ("mask", "a mask of 6 rows and 6 columns, where this rank has 6 positions of 12"),
        ("open", "did not call torch.nn.functional.scaled_dot_product_attention"),
        ("other", "attention of 5 queries over 5 keys, where this rank has 6 positions of 12"),
        ("weights", "MultiheadAttention returns weights"),
        ("positions", "positions of 12 tokens, where this rank has 6 of 12"),
        ("short", "the table short has 4 rows along dim 0, and sequences have 12 positions"),
    ],
)
def test_what_cannot_be_right_is_refused(worlds: Any, what: str, said: str) -> None:
    for told in worlds(2).run(attempt, what):
        assert said in told
