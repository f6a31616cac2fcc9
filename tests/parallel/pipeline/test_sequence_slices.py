"""Schedules over slices of sequences (seqpipe, seqvpp, seqsmartvpp), against one process."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import solve_mesh
from pdrun.parallel.context_parallel.context import ContextParallel, positions
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.pipeline.schedules.builders import SLICED, make_schedule
from pdrun.parallel.pipeline.schedules.schedule import parse_schedule
from pdrun.parallel.pipeline.schedules.timeline import bubble_share, draw_schedule
from pdrun.parallel.pipeline.schedules.validate import validate_schedule
from tests.lib import causal_models
from tests.lib.pipeline_cases import Case
from tests.parallel.pipeline.test_schedules_on_ranks import check, refused

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("transformers",) if importlib.util.find_spec("transformers") else ()


# ---- schedules --------------------------------------------------------------


@pytest.mark.parametrize("name", SLICED)
def test_every_count_makes_a_possible_schedule(name: str) -> None:
    ranks = (2, 4, 6) if name == "seqsmartvpp" else (1, 2, 3, 6)
    chunks = (None,) if name == "seqpipe" else (None, 3)
    for counts in itertools.product(ranks, (1, 2, 5), chunks, (1, 2, 3)):
        found = make_schedule(name, *counts)
        validate_schedule(found)
        assert found.microbatch_count == counts[1]
        assert found.piece_count == counts[1] * counts[3]


def test_slices_shorten_the_bubble_and_what_is_live() -> None:
    """Live activations of a slice are a part of those of a micro-batch."""
    plain, sliced = make_schedule("1f1b", 4, 8), make_schedule("seqpipe", 4, 8, slices=4)
    assert (round(bubble_share(plain), 3), round(bubble_share(sliced), 3)) == (0.273, 0.086)
    assert validate_schedule(plain).live == (4, 3, 2, 1)
    assert validate_schedule(sliced).live == (7, 6, 5, 4)  # quarters
    chunks = [max(validate_schedule(make_schedule(name, 4, 8, slices=4)).live) for name in SLICED]
    assert chunks == [7, 14, 11]  # those of chunks are eighths


def test_a_drawing_has_slices() -> None:
    assert (
        draw_schedule(make_schedule("seqpipe", 2, 2))
        == """
rank 0  F0.0 F0.1 F1.0 .    .    B0.1 -    F1.1 B0.0 -    .    B1.1 -    B1.0 -
rank 1  .    F0.0 F0.1 B0.1 -    F1.0 B0.0 -    F1.1 B1.1 -    B1.0 -    .    .
""".strip()
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F1 0F0 0B1 0B0", "0F1 before 0F0, another slice of its rows"),
        ("0F0 0F1 0B0 0B1", "0B0 before 0B1, another slice of its rows"),
    ],
)
def test_slices_have_an_order(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        validate_schedule(parse_schedule(text, slices=2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": "1f1b", "slices": 2}, "slices=2, and 1f1b does not slice sequences"),
        ({"schedule": "seqpipe", "chunks": 2}, "chunks=2, and seqpipe has 1 a rank"),
        ({"schedule": "seqsmartvpp", "ranks": 3}, "an even number of ranks along pp, got 3"),
        ({"schedule": "seqpipe", "slices": 0}, "slices must be an integer of at least 1"),
        ({"schedule": "seqpipe", "microbatches": 1, "ranks": 4}, "times slices=2 is less than"),
    ],
)
def test_counts_that_do_not_fit_are_refused(options: dict[str, Any], told: str) -> None:
    ranks = options.pop("ranks", 2)
    with pytest.raises(UsageError, match=told):
        Pipeline(**{"microbatches": 4, **options}).plan(ranks)


# ---- against one process ----------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "slices"),
    [
        ("seqpipe", 2),
        ("seqvpp", 4),
        ("seqsmartvpp", 3),
        pytest.param("seqpipe", 6, marks=pytest.mark.thorough),
        pytest.param("seqvpp", 1, marks=pytest.mark.thorough),
    ],
)
def test_every_schedule_equals_one_process(worlds: Any, schedule: str, slices: int) -> None:
    """Six positions do not divide by four."""
    more = (("schedule", schedule), ("slices", slices))
    check(worlds, Case("tied", double=True, rows=(16, 13), more=more))


@pytest.mark.parametrize(
    ("schedule", "model", "run"),
    [
        ("seqpipe", "dropout", {"recompute": "full", "optimizer_level": 3}),
        ("seqvpp", "dropout", {"optimizer_level": 2}),
        ("seqpipe", "tied", {"recompute": "selective", "optimizer_level": 1}),
        pytest.param(
            "seqsmartvpp",
            "dropout",
            {"recompute": ["blocks.1"], "optimizer_level": 3},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "seqpipe",
            "tied",
            {"optimizer_level": 3, "gather": "pass", "exact": False},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_levels_and_recomputation(
    worlds: Any, schedule: str, model: str, run: dict[str, Any]
) -> None:
    more = (("schedule", schedule),)
    check(worlds, Case(model, dp=2, rows=(16, 13), more=more, run=tuple(run.items())))


@pytest.mark.thorough
def test_beside_a_tensor_axis(worlds: Any) -> None:
    styles = {"blocks.*.up": pdrun.col("tp"), "blocks.*.down": pdrun.row("tp")}
    run = (("strategy", pdrun.Strategy(styles)), ("recompute", "full"))
    check(worlds, Case("dropout", tp=2, rows=(16, 13), more=(("schedule", "seqvpp"),), run=run))


def test_a_schedule_of_ones_own(worlds: Any) -> None:
    text = "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2\n1F0 1F1 1I1 1I0 1W0 1W1 1F2 1F3 1B3 1B2"
    more = (("schedule", text), ("slices", 2))
    check(worlds, Case("tied", microbatches=2, double=True, more=more))


class Attention(nn.Module):
    """Fewer heads of keys than of queries; masks, biases and dropout of its weights."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.p = nn.LayerNorm(24), p
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(2, (4, 6)).transpose(1, 2)
        k, v = self.kv(y).unflatten(2, (2, 2, 6)).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=p, is_causal=mask is None, enable_gqa=True
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Sequences(nn.Module):
    """A decoder with positions: from a table, or by `pdrun.positions`."""

    def __init__(self, p: float = 0.0, mask: str = "") -> None:
        super().__init__()
        self.emb, self.places = nn.Embedding(37, 24), nn.Embedding(16, 24)
        self.blocks = nn.ModuleList(Attention(p) for _ in range(4))
        self.head, self.mask = nn.Linear(24, 37), mask

    def forward(self, words: Tensor) -> Tensor:
        count = words.shape[1]
        if self.mask == "asks":
            x = self.emb(words) + self.places(positions(count))
        else:
            x = self.emb(words) + self.places.weight[:count]
        mask = self.make_mask(16) if self.mask in ("bool", "bias", "open") else None
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]

    def make_mask(self, size: int) -> Tensor:
        """The mask of the full sequence: the last four positions before each."""
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        if self.mask == "open":
            return seen | (torch.arange(size) < 9)
        if self.mask == "bool":
            return seen.triu(-4)
        bias = torch.linspace(-1, 1, size).expand(size, size)
        return bias.masked_fill(~seen, torch.finfo(bias.dtype).min)


def sequence_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Sum over words, and their number."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), len(
        batch[1].flatten()
    )


def mean_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over words."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def train_sequences(
    pp: int, p: float, mask: str, options: dict[str, Any], run: dict[str, Any]
) -> Any:
    """Make two steps; return losses, norms and weights."""
    torch.manual_seed(0)
    tables = {} if mask == "asks" else {"places.weight": 0}
    made = parallelize(
        Sequences(p, mask),
        lambda params: torch.optim.SGD(params, lr=0.1),
        run.pop("loss", sequence_loss),
        mesh=solve_mesh(pp, {"pp": pp}),
        pipeline=Pipeline(3, **options) if pp > 1 else None,
        context=ContextParallel(tables=tables) if pp > 1 else None,
        norm=True,
        seed=5,
        **(run if pp > 1 else {"accumulate": 3}),
    )
    found = []
    for step in range(2):
        words = torch.randint(37, (6, 17), generator=torch.Generator().manual_seed(step))
        told = made.step((words[:, :-1].contiguous(), words[:, 1:].contiguous()))
        found.append((told.loss, told.grad_norm))
    evaluated = made.evaluate(iter([(words[:, :-1], words[:, 1:])])).loss
    weights = {name: weight.detach().numpy() for name, weight in made.full_weights().items()}
    return found, evaluated, weights


@pytest.mark.parametrize(
    ("p", "mask", "run"),
    [
        (0.3, "asks", {"recompute": "full"}),
        (0.0, "bool", {"recompute": "selective"}),
        (0.3, "bias", {}),
    ],
)
def test_masks_positions_and_dropout(worlds: Any, p: float, mask: str, run: dict[str, Any]) -> None:
    options = {"schedule": "seqvpp", "slices": 3}
    want, evaluated, weights = worlds(1).run(train_sequences, 1, p, mask, {}, {})[0]
    for losses, other, found in worlds(2).run(train_sequences, 2, p, mask, options, run):
        np.testing.assert_allclose(losses, want, rtol=2e-6)
        np.testing.assert_allclose(other, evaluated, rtol=2e-6)
        for name, weight in weights.items():
            np.testing.assert_allclose(found[name], weight, rtol=1e-5, atol=2e-6, err_msg=name)


# ---- models of transformers -------------------------------------------------


def library_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Sum over words, and their number."""
    logits, targets = output.logits.flatten(0, 1), batch["targets"].flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets)


def call_library(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Call a model of transformers."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return model(input_ids=ids, attention_mask=mask, use_cache=False)


def train_library(kind: str, pp: int, is_padded: bool) -> list[tuple[float, Any]]:
    """Make two steps; return losses and norms."""
    transformers = __import__("transformers")
    config, name, sizes = causal_models.KINDS[kind]
    torch.manual_seed(0)
    run = parallelize(
        getattr(transformers, name)(getattr(transformers, config)(**sizes)),
        lambda params: torch.optim.SGD(params, 0.1),
        library_loss,
        forward=call_library,
        mesh=solve_mesh(pp, {"pp": pp}),
        norm=True,
        seed=1,
        **({"pipeline": Pipeline(2, "seqpipe")} if pp > 1 else {"accumulate": 2}),
    )
    found = []
    for step in range(2):
        words = torch.randint(3, 61, (4, 13), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": words[:, :-1].contiguous(), "targets": words[:, 1:].contiguous()}
        if is_padded:
            batch["attention_mask"] = (
                torch.arange(12) < torch.tensor([12, 9, 10, 12])[:, None]
            ) * 1
        told = run.step(batch)
        found.append((told.loss, told.grad_norm))
    return found


@pytest.mark.parametrize(
    ("kind", "is_padded"),
    [
        ("mistral", True),
        pytest.param("llama", False, marks=pytest.mark.thorough),
        pytest.param("llama", True, marks=pytest.mark.thorough),
        pytest.param("gpt2", True, marks=pytest.mark.thorough),
    ],
)
def test_models_of_transformers(worlds: Any, kind: str, is_padded: bool) -> None:
    """Masks of the library, with padding and a window, and positions that it counts."""
    pytest.importorskip("transformers")
    want = worlds(1).run(train_library, kind, 1, is_padded)[0]
    for found in worlds(2).run(train_library, kind, 2, is_padded):
        np.testing.assert_allclose(found, want, rtol=2e-6)


# ---- what is refused --------------------------------------------------------


def test_a_mask_that_shows_later_slices_is_refused(worlds: Any) -> None:
    told = worlds(2).failures(train_sequences, 2, 0.0, "open", {"schedule": "seqpipe"}, {})
    assert any("a mask shows keys of later slices" in text for _, text in told), told


def test_a_mean_is_refused(worlds: Any) -> None:
    run = {"loss": mean_loss}
    told = worlds(2).failures(train_sequences, 2, 0.0, "", {"schedule": "seqpipe"}, run)
    assert any("means of slices cannot be added" in text for _, text in told), told


@pytest.mark.parametrize(
    ("model", "run", "told"),
    [
        ("row", (), "did not call torch.nn.functional.scaled_dot_product_attention"),
        ("tiny", (("compile", "blocks.*"),), "compile= is not supported with 2 slices"),
        ("tiny", (("native_dropout", True),), "native_dropout=True is not supported with 2"),
    ],
)
def test_what_slices_cannot_do_is_refused(worlds: Any, model: str, run: Any, told: str) -> None:
    assert told in refused(worlds, Case(model, more=(("schedule", "seqpipe"),), run=run))


def test_operators_are_refused(worlds: Any) -> None:
    case = Case("tiny", tp=1, cut="megatron", more=(("schedule", "seqpipe"),))
    assert "strategy=pdrun.Operators is not supported with 2 slices" in refused(worlds, case)
