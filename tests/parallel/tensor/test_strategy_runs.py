"""
Runs of `parallelize(strategy=Strategy(...))`: proven against one process, with everything that goes
together.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.model.meta_init import empty_init
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.tensor import Strategy, col, cross_entropy, row
from tests.lib.decoder_model import Decoder, build, strategy, tokens
from tests.lib.tiers import thorough

pytestmark = pytest.mark.torch
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


def token_loss(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(logits, batch[1], reduction="sum"), (batch[1] != -100).sum()


def make(
    degrees: dict[str, int], sizes: dict[str, Any], how: dict[str, Any], **options: Any
) -> Run:
    model = build(torch.float32, **sizes)
    return parallelize(
        model,
        ADAM,
        token_loss,
        mesh=mesh.make_mesh(**degrees),
        strategy=strategy(**how),
        norm=True,
        seed=3,
        **options,
    )


def proven(*args: Any, **options: Any) -> tuple[list[float], list[float]]:
    run = make(*args, **options)
    run.verify([tokens(rows=8), tokens(rows=7)])
    told = [run.step(tokens(rows=rows)) for rows in (8, 7, 8)]
    return [m.loss for m in told], [m.grad_norm for m in told]


def alone(sizes: dict[str, Any], **options: Any) -> tuple[list[float], list[float]]:
    run = parallelize(build(torch.float32, **sizes), ADAM, token_loss, norm=True, seed=3, **options)
    told = [run.step(tokens(rows=rows)) for rows in (8, 7, 8)]
    return [m.loss for m in told], [m.grad_norm for m in told]


@pytest.mark.parametrize(
    ("degrees", "sizes", "how", "options"),
    [
        (
            {"dp": 1, "tp": 2},
            {"tied": True},
            {"sequence": True, "gather": False},
            {"recompute": "full"},
        ),
        (
            {"dp": 2, "tp": 2},
            {"n_kv": 1, "p": 0.2},
            {"sequence": True},
            {"optimizer_level": 1, "clip": 0.5},
        ),
        (
            {"dp": 1, "tp": 4},
            {"n_kv": 2, "p": 0.2, "tied": True},
            {"gather": False},
            {"accumulate": 2},
        ),
        (
            {"dp": 2, "tp": 2},
            {"tied": True, "p": 0.2},
            {"sequence": True, "gather": False},
            {"optimizer_level": 3, "recompute": "selective"},
        ),
        thorough(
            {"dp": 2, "tp": 2},
            {"p": 0.2},
            {},
            {"optimizer_level": 2, "accumulate": 2, "recompute": "full"},
        ),
        (
            {"dp": 1, "x": 2, "y": 2},
            {"hidden": 48, "words": 40, "p": 0.2},
            {"axis": ("y", "x"), "sequence": True, "hidden": 48},
            {},
        ),
    ],
    ids=str,
)
def test_a_run_with_a_strategy_is_what_one_process_computes(
    worlds: Any, degrees: Any, sizes: Any, how: Any, options: Any
) -> None:
    """
    Dropout, ties, sequence parts, recomputation and optimizer levels; the masks are those of one
    process.
    """
    losses, norms = worlds(math.prod(degrees.values())).run(proven, degrees, sizes, how, **options)[
        0
    ]
    same = {key: value for key, value in options.items() if key == "clip"}
    want = worlds(1).run(
        alone, sizes, accumulate=degrees["dp"] * options.get("accumulate", 1), **same
    )[0]
    assert losses == pytest.approx(want[0], rel=2e-5)
    assert norms == pytest.approx(want[1], rel=2e-4)


def from_nothing() -> float:
    with empty_init():
        model = Decoder(tied=True)
    run = parallelize(
        model,
        ADAM,
        token_loss,
        mesh=mesh.make_mesh(dp=2, tp=2),
        strategy=strategy(),
        optimizer_level=2,
    )
    assert run.model.emb.weight is run.model.head.weight
    run.verify([tokens(rows=8)])
    return run.step(tokens(rows=8)).loss


def test_weights_that_are_made_later_stay_tied(worlds: Any) -> None:
    losses = worlds(4).run(from_nothing)
    assert losses == losses[:1] * 4


def explained() -> str:
    return make({"dp": 2, "tp": 2}, {}, {}).explain(tokens(rows=8))


def test_explain_lists_what_is_cut_and_what_is_not(worlds: Any) -> None:
    told = worlds(4).run(explained)[0]
    assert "sharded by L('tp', None): emb.weight, layers.0.attn.wq.weight" in told
    assert "replicated over the tensor axes: layers.0.norm1.weight" in told


def ill_matched(styles: dict[str, Any]) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    run = parallelize(
        model,
        ADAM,
        lambda out, batch: (out.sum(), len(out)),
        mesh=mesh.make_mesh(tp=2),
        strategy=Strategy(styles),
    )
    try:
        run.step(torch.ones(4, 8))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("styles", "told"),
    [
        (
            {"*": col("tp")},
            "1: it takes 8 features on this rank, got 4; col takes a full input",
        ),
        (
            {"*": row("tp")},
            "0: it takes 4 features on this rank, got 8; row takes a shard",
        ),
    ],
)
def test_modules_that_do_not_follow_each_other_are_named_on_every_rank(
    worlds: Any, styles: Any, told: str
) -> None:
    assert [told in error for error in worlds(2).run(ill_matched, styles)] == [True, True]
