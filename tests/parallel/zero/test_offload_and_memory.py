"""
What saves memory changes no bit: offloading, files, weights without memory; and predictions that
can be held to.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.checkpoint import safetensors
from pdrun.parallel.model import meta_init as meta
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.report import memory
from pdrun.parallel.report.storage_counter import StorageCounter
from pdrun.parallel.zero import offload
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case
from tests.parallel.test_known_faults import LEVELS, pair, sgd, square_loss
from tests.parallel.test_transparency import check

pytestmark = pytest.mark.torch


@LEVELS
@pytest.mark.parametrize("what", ["optimizer", "activations", "all"])
def test_offloading_changes_no_bit(level: int, what: Any, worlds: Worlds, tmp_path: Path) -> None:
    away = offload.parse_offload(what)
    away = offload.Offload(
        away.optimizer, tmp_path / "files" if what == "all" else None, away.activations, least=100
    )
    check(
        Case(
            2,
            level,
            accumulate=2,
            recompute="full" if level == 3 else None,
            more=(("offload", away),),
        ),
        worlds,
        tmp_path,
    )
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]


def moved(least: int) -> tuple[int, int]:
    run = zoo.make(Case(1), offload=offload.Offload(activations=True, least=least))
    run.step(zoo.batch_of(24, 0))
    assert run.state.activation_offload is not None
    return run.state.activation_offload.moved_bytes, memory.estimate_passes(
        run.state, zoo.batch_of(24, 0)
    )


def predicted_away() -> list[int]:
    batch, found = zoo.batch_of(24, 0), []
    for least, away in ((100, False), (100, True), (1 << 30, True)):
        run = zoo.make(Case(1), offload=offload.Offload(activations=True, least=least))
        found.append(memory.estimate_passes(run.state, batch, away))
    return found


def test_what_is_offloaded_is_not_predicted_for_the_device(worlds: Worlds) -> None:
    whole, away, none = worlds(1).run(predicted_away)[0]
    assert away < 0.8 * whole
    assert none == whole  # nothing is large enough to go


def test_activations_really_go(worlds: Worlds) -> None:
    some, held = worlds(1).run(moved, 100)[0]
    assert 0.2 * held < some < 3 * held
    assert worlds(1).run(moved, 1 << 30)[0][0] == 0


@pytest.mark.parametrize("value", ["disk", 3, True])
def test_wrong_offload(value: Any) -> None:
    with pytest.raises(UsageError, match=r"'optimizer', 'activations', 'all', a pdrun\.Offload"):
        offload.parse_offload(value)
    with pytest.raises(UsageError, match="requires optimizer=True"):
        offload.Offload(disk="x")


# ---- weights without memory -------------------------------------------------


class Rotary(nn.Module):
    """A model with a table in a buffer that isn't saved, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 8)
        self.register_buffer("table", torch.arange(8.0).cos(), persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.table
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def filled(level: int, times: int) -> Any:
    with pdrun.empty_init():
        model = Rotary()
    assert all(p.device.type == "meta" for p in model.parameters())
    assert model.head.weight is model.emb.weight
    run = parallelize(model, sgd, zoo.token_loss, optimizer_level=level, accumulate=times, seed=3)
    first = {name: value.tolist() for name, value in run.full_weights().items()}
    words = torch.arange(48).view(12, 4) % 30
    return first, [run.step((words, words)).loss for _ in range(3)], model.table.tolist()


@LEVELS
def test_weights_made_in_place_are_the_same_everywhere(level: int, worlds: Worlds) -> None:
    """
    pytorch#168058, torchtitan#316: sharded initialisation that differs, and buffers full of
    garbage.
    """
    want = worlds(1).run(filled, 0, 3)[0]
    assert all(message == want for message in worlds(3).run(filled, level, 1))
    assert want[2] == torch.arange(8.0).cos().tolist()
    values = torch.tensor(want[0]["blocks.0.0.weight"])
    assert 0.1 < float(values.std()) < 0.3
    assert not torch.equal(values, torch.tensor(want[0]["blocks.1.0.weight"]))


def unfilled(kind: str) -> None:
    if kind == "buffer":
        with torch.device("meta"):
            model: nn.Module = Rotary()
    else:
        with pdrun.empty_init():
            model = zoo.Tiny()
    options = {"init": lambda module: None} if kind == "nothing" else {}
    parallelize(model, sgd, zoo.token_loss, **options)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("buffer", "the buffer table is on the meta device and has no value"),
        ("parameter", "the model (Tiny) has no reset_parameters"),
        ("nothing", "left"),
    ],
)
def test_what_would_be_garbage_is_refused(kind: str, text: str, worlds: Worlds) -> None:
    (message,) = worlds(1).failures(unfilled, kind)
    assert message[0] == "UsageError"
    assert text in message[1]


def test_modules_are_as_ever_outside() -> None:
    with meta.empty_init():
        pass
    assert nn.Linear(2, 2).weight.device.type == "cpu"


# ---- predictions ------------------------------------------------------------


def test_the_ledger_counts_what_lives() -> None:
    with StorageCounter() as ledger:
        a = torch.ones(1000)
        b = a + 1
        view = b.view(10, 100)
        del a
        c = view * 2
    assert (ledger.now, ledger.peak) == (8000, 8000)
    del b, view, c
    assert ledger.now == 0


def predicted(level: int, recompute: Any) -> tuple[int, int]:
    """Return predicted and counted bytes of the passes of one micro-batch."""
    run = zoo.make(Case(1, level, recompute=recompute))
    batch = zoo.batch_of(24, 0)
    run.step(batch)
    want = memory.estimate_passes(run.state, batch)
    ledger = StorageCounter()
    run.state.engine.begin_gradients(True, True)
    for weight in run.state.engine.weights:
        weight.param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    run.state.engine._make_grad_hook = lambda index: lambda param: None
    ledger.ignore_existing([*run.model.parameters(), *run.model.buffers(), *batch])
    with ledger:
        total, _ = run.state.compute_objective(run.model, batch, range(24), 0)
        total.backward()
    return want, ledger.peak


@pytest.mark.parametrize("recompute", [None, "full"])
def test_fake_passes_hold_what_real_ones_do(recompute: Any, worlds: Worlds) -> None:
    want, found = worlds(1).run(predicted, 0, recompute)[0]
    assert want == pytest.approx(found, rel=0.1)


def explained(world: int) -> list[str]:
    run = zoo.make(Case(world, 3, accumulate=2, tied=True, recompute="full"))
    text = run.explain(zoo.batch_of(24, 0))
    plan = run.plan
    assert plan.level == 3
    assert [w for part in plan.transfers for w in part["weights"]]
    return text.split("\n")


def test_explain(worlds: Worlds) -> None:
    lines = worlds(2).run(explained, 2)[0]
    assert lines[0] == "mesh(dp=2) on cpu: each batch is cut into 2 x 2 = 4 slices"
    assert (
        lines[1]
        == "level 3: optimizer state, gradients and weights are sharded over groups of 2 of 2 ranks"
    )
    assert "tied, counted once: emb.weight = head.weight" in lines
    assert "recomputed in the backward pass: blocks.0, blocks.1, blocks.2" in lines
    assert lines[-1].startswith("peak ")


def shares(level: int) -> Any:
    run = zoo.make(Case(4, level))
    found = run.memory()
    return found.weights, found.masters, found.gradients, found.state


def test_levels_take_less_and_less(worlds: Worlds) -> None:
    zero, one, two, three = (worlds(4).run(shares, level)[0] for level in range(4))
    assert one[3] < 0.3 * zero[3]
    assert two[2] <= one[2]
    assert three[0] < 0.8 * two[0]


# ---- safetensors ------------------------------------------------------------


def exported(level: int, path: str) -> list[Any]:
    run = zoo.make(Case(2, level, tied=True))
    run.step(zoo.batch_of(8, 0))
    run.export(path)
    torch.distributed.barrier()
    other = zoo.make(Case(2, 3 - level, tied=True))
    other.load_weights(path)
    mine, theirs = run.full_weights(), other.full_weights()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])] + [
        len(mine) - len(theirs)
    ]


@LEVELS
def test_export_and_import(level: int, worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert worlds(2).run(exported, level, str(path)) == [[0], [0]]
    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import load_file

        assert set(load_file(path)) == set(safetensors.SafetensorsFile(path).entries)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}"[:1], b"\x07" + b"\0" * 7 + b'{"a":1}']
)
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        safetensors.SafetensorsFile(path)


def wrong_shape(path: str) -> None:
    run = parallelize(nn.Linear(6, 1), sgd, square_loss)
    run.step(pair(4))
    run.export(path)
    parallelize(nn.Linear(6, 2), sgd, square_loss).load_weights(path)


def test_weights_of_another_shape_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    (message,) = worlds(1).failures(wrong_shape, str(tmp_path / "x"))
    assert "weight has shape (1, 6), (2, 6) in this run" in message[1]


# ---- runs that are over -----------------------------------------------------


def leaves(case: Case) -> tuple[bool, int]:
    run = zoo.make(case, **dict(case.more))
    run.step(zoo.batch_of(24, 0))
    engine, model = weakref.ref(run.state.engine), weakref.ref(run.model)
    del run
    gc.collect()
    torch_compat.destroy_unused_groups()
    left = (
        len(torch.distributed.distributed_c10d._world.pg_map)
        if torch.distributed.is_initialized()
        else 0
    )
    return engine() is None and model() is None, left


@LEVELS
def test_a_run_that_nobody_holds_leaves_nothing(level: int, worlds: Worlds) -> None:
    """
    torch keeps hooks of tensors where the collector does not look: they must not hold the run.
    """
    found = [worlds(2).run(leaves, Case(2, level, recompute="full")) for _ in range(2)]
    assert [[gone for gone, _ in ranks] for ranks in found] == [[True, True]] * 2
    assert found[0] == found[1]  # no group is left of the first that the second has to bear
