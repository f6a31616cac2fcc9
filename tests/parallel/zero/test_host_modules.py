"""Modules on the host, ``offload={"emb": "host"}``: the same bits, and where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.zero.offload import Offload, parse_offload
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import LENGTH, WIDTH, Case
from tests.parallel.context_parallel import test_context_runs as context_runs
from tests.parallel.test_known_faults import LEVELS, sgd, square_loss
from tests.parallel.test_transparency import check

pytestmark = pytest.mark.torch
EMBEDDING = {"emb": "host"}


@LEVELS
def test_a_module_on_the_host_changes_no_bit(level: int, worlds: Worlds, tmp_path: Path) -> None:
    """With accumulation, clipping, dropout, and a checkpoint that is taken up again."""
    more = (("offload", EMBEDDING),)
    case = Case(2, level, accumulate=2, clip=0.5, dropout=True, more=more)
    check(case, worlds, tmp_path)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"level": 3, "recompute": "full"}, {"offload": Offload(modules=["emb", "head"])}),
        ({"level": 1}, {"offload": Offload(optimizer=True, modules="blocks.1")}),
        ({"level": 0}, {"offload": Offload(activations=True, least=8, modules="blocks.*.up")}),
    ],
)
def test_beside_other_options(
    options: dict[str, Any], more: dict[str, Any], worlds: Worlds, tmp_path: Path
) -> None:
    check(Case(2, **options, more=tuple(more.items())), worlds, tmp_path)


def train_copies(offload: Any) -> list[tuple[float, float]]:
    """Train two copies of each rank's rows."""
    run = zoo.make(Case(2, 2, clip=0.5), offload=offload, copies=2)
    found = [run.step(zoo.batch_of(24, step)) for step in range(3)]
    return [(told.loss, told.grad_norm) for told in found]


def test_copies_of_a_step(worlds: Worlds) -> None:
    """A norm is that of the same bits, up to the order of its sum (`square_sum`)."""
    want, found = (worlds(2).run(train_copies, offload) for offload in (None, EMBEDDING))
    for mine, plain in zip(found, want, strict=True):
        assert [loss for loss, _ in mine] == [loss for loss, _ in plain]
        assert [norm for _, norm in mine] == pytest.approx([norm for _, norm in plain], rel=1e-14)


def train_sequences(cp: int) -> Any:
    """Train a model with an embedding on the host, whose sequences are on several ranks."""
    run = context_runs.make(
        {"cp": cp}, {} if cp > 1 else None, 0.1, offload={"wte": "host"}, optimizer_level=2
    )
    found = [run.step(context_runs.batch_of(2, 12, step)) for step in range(2)]
    return [(told.loss, told.grad_norm) for told in found]


@pytest.mark.thorough
def test_sequences_on_several_ranks(worlds: Worlds) -> None:
    want = worlds(1).run(train_sequences, 1)[0]
    for found in worlds(2).run(train_sequences, 2):
        for mine, one in zip(found, want, strict=True):
            assert mine == pytest.approx(one, rel=2e-6)


def where_everything_is(level: int) -> dict[str, Any]:
    """Return what the engine has made of a model whose embedding is on the host."""
    run = zoo.make(Case(2, level), offload=EMBEDDING)
    run.step(zoo.batch_of(24, 0))
    engine, host = run.state.engine, run.state.host_modules
    assert host is not None
    mine = [part for part in engine.gradient_buckets if part.weights[0].is_on_host]
    cut = {weight.name for part in engine.sharded_buckets for weight in part.weights}
    return {
        "on host": [weight.name for part in mine for weight in part.weights],
        "groups": [part.comm is engine.place.host for part in mine],
        "apart": [part.comm is engine.place.host for part in engine.gradient_buckets],
        "cut": "emb.weight" in cut,
        "bytes": host.copied_bytes,
        "line": [line for line in run.explain().splitlines() if "host" in line],
    }


@LEVELS
def test_gradients_are_summed_on_the_host(level: int, worlds: Worlds) -> None:
    for found in worlds(2).run(where_everything_is, level):
        assert found["on host"] == ["emb.weight"]
        assert found["groups"] == [True]
        assert found["apart"].count(True) == 1 < len(found["apart"])
        assert not found["cut"]
        # 12 rows of tokens go there, their embeddings come back
        assert found["bytes"] == 12 * LENGTH * 8 + 12 * LENGTH * WIDTH * 4
        assert found["line"] == ["computed on the host: emb (0.0 MiB of weights)"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@LEVELS
def test_on_a_gpu_the_weights_stay_on_the_host(level: int) -> None:
    torch.manual_seed(0)
    run = pdrun.parallelize(
        zoo.Tiny().cuda(),
        lambda params: torch.optim.AdamW(params, 1e-3),
        zoo.token_loss,
        optimizer_level=level,
        clip=0.5,
        offload=EMBEDDING,
    )
    run.step(zoo.batch_of(24, 0))
    emb = run.model.emb.weight
    assert emb.device.type == "cpu"
    assert all(value.device.type == "cpu" for value in run.optimizer.state[emb].values())
    others = [p for name, p in run.model.named_parameters() if not name.startswith("emb")]
    assert {param.device.type for param in others} == {"cuda"}


# ---- what is refused --------------------------------------------------------


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (zoo.Tiny, {"offload": {"embb": "host"}}, "'embb' matches no module"),
    (
        lambda: zoo.Tiny(tied=True),
        {"offload": EMBEDDING},
        "emb.weight is on the host, and is tied to head.weight, which is not",
    ),
    (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        {"offload": {"1": "host"}},
        "1 has statistics of a batch",
    ),
    (zoo.Tiny, {"compile": True}, "emb is on the host, which compile= does not support"),
    (
        zoo.Tiny,
        {"pipeline": pdrun.Pipeline(2)},
        "emb is on the host, which pipeline= does not support",
    ),
    (
        zoo.Tiny,
        {"strategy": pdrun.Strategy({})},
        "emb is on the host, which strategy= does not support",
    ),
]


def make_refused(index: int) -> None:
    """Call parallelize with one of `REFUSED`."""
    model, options, _ = REFUSED[index]
    parallelize(model(), sgd, square_loss, **{"offload": EMBEDDING, **options})


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_cannot_be_combined_is_refused(index: int, worlds: Worlds) -> None:
    ((kind, told),) = worlds(1).failures(make_refused, index)
    assert kind == "UsageError"
    assert REFUSED[index][2] in told


@pytest.mark.parametrize("value", [{"emb": "disk"}, {}, {"emb": 1}])
def test_other_places_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="offload"):
        parse_offload(value)


def test_globs_of_an_offload() -> None:
    assert parse_offload({"a": "host", "b.*": "host"}).module_globs == ("a", "b.*")
    assert Offload(modules="a").module_globs == ("a",)
    with pytest.raises(UsageError, match="modules must be a glob or a list of globs"):
        Offload(modules=[3])  # type: ignore[list-item]
