"""
What a checkpoint is taken up by: the run that it belongs to, whole, on all ranks alike; anything
else is told.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

import pdrun
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region
from pdrun.parallel.checkpoint.storage import TensorPiece
from pdrun.parallel.run import Run
from tests.lib.rank_pool import Worlds
from tests.lib.tiers import thorough
from tests.lib.worker_processes import clean
from tests.parallel.test_user_loops import adam, loss, mlp, rows, sgd

pytestmark = pytest.mark.torch


def made(optimizer: Any = adam, model: nn.Module | None = None, **options: Any) -> Run:
    return pdrun.parallelize(model or mlp(), optimizer, loss, **options)


def went_on(
    folder: Path, before: Callable[[], Run], after: Callable[[], Run]
) -> tuple[list[float], list[float]]:
    """
    Train, save after the second step, and return the losses of the further ones, of the run and of
    one resumed.
    """
    run, dtype = before(), torch.float32
    for step in range(2):
        run.step(rows(step))
    run.save(folder)
    went = [run.step(rows(step)).loss for step in (2, 3, 4)]
    other = after()
    other.load(folder)
    dtype = next(other.model.parameters()).dtype
    return went, [other.step(rows(step).to(dtype)).loss for step in (2, 3, 4)]


# ---- of something else ------------------------------------------------------


def grouped(first: int) -> Any:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        parts = [[p for p in params if p.ndim == 2], [p for p in params if p.ndim == 1]]
        fast = [{"params": part, "lr": lr} for part, lr in zip(parts, (1e-2, 1e-3), strict=True)]
        return torch.optim.AdamW([fast[first], fast[1 - first]])

    return make


class Kept(nn.Module):
    """Something with a buffer."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(6, 3)
        self.register_buffer("kept", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def stacked(layers: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)]), nn.Linear(6, 3))


def stepping(optimizer: Any) -> Any:
    return rates.StepLR(optimizer, 2)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sgd for adam": (
        {"optimizer": sgd},
        {},
        "was saved with the optimizer SGD, this run has the optimizer AdamW",
    ),
    "groups in another order": (
        {"optimizer": grouped(0)},
        {"optimizer": grouped(1)},
        "lacks 0.bias in the optimizer's group 0, unlike this run",
    ),
    "less trained": (
        {"optimizer": lambda params: adam(params[:2])},
        {},
        "lacks 2.bias in the optimizer's group 0",
    ),
    "no scheduler": (
        {},
        {"scheduler": stepping},
        "with no scheduler, this run has the scheduler StepLR",
    ),
    "another scheduler": (
        {"scheduler": stepping},
        {"scheduler": lambda opt: rates.CosineAnnealingLR(opt, 4)},
        "the scheduler StepLR, this run has the scheduler CosineAnnealingLR",
    ),
    "fewer layers": (
        {"model": lambda: stacked(3)},
        {"model": lambda: stacked(2)},
        "has the weight 0.2.weight, which this run lacks",
    ),
    "a buffer less": (
        {"model": lambda: Kept(torch.ones(3))},
        {"model": lambda: Kept(None)},
        "has the buffer kept, which this run lacks",
    ),
    "a longer buffer": (
        {"model": lambda: Kept(torch.ones(3))},
        {"model": lambda: Kept(torch.ones(4))},
        r"kept has shape \(3,\), \(4,\) in this run",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    """
    All of these had been taken up without a word, or had ended in an error of torch's at the next
    step.
    """
    one, two, message = OTHERS[name]

    def make(options: dict[str, Any]) -> Run:
        return made(**{key: value() if key == "model" else value for key, value in options.items()})

    with pytest.raises(ConfigError, match=message):
        went_on(tmp_path, lambda: make(one), lambda: make(two))
    again = {**one, "model": one.get("model", mlp)}
    went, on = went_on(tmp_path / "same", lambda: make(again), lambda: make(again))
    assert went == on


# ---- what is saved with a run -----------------------------------------------


class Counted(torch.optim.Optimizer):
    """Keeps whole numbers, words and a function."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "bent": lambda n: 1 / n})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["n"], state["last"] = state.get("n", 0) + 1, ["a", None, 1.5]
                assert isinstance(state["n"], int)
                param -= group["lr"] * group["bent"](state["n"]) * param.grad


WAYS: dict[str, Callable[[], Run]] = {
    "state that is no tensor": lambda: made(Counted),
    "milestones in a sequence": lambda: made(
        scheduler=lambda opt: rates.SequentialLR(
            opt, [rates.LinearLR(opt, 0.1, total_iters=3), rates.MultiStepLR(opt, [1, 2])], [3]
        )
    ),
    "a rate of fp64": lambda: made(
        lambda params: torch.optim.AdamW(params, torch.tensor(0.01, dtype=torch.float64))
    ),
    "uint16": lambda: made(model=Kept(torch.ones(3, dtype=torch.uint16))),
    "float8": lambda: made(model=Kept(torch.ones(3).to(torch.float8_e4m3fn))),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_saved_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    went, on = went_on(tmp_path, WAYS[name], WAYS[name])
    assert went == on
    run = WAYS[name]()
    before = [type(value) for value in run.optimizer.param_groups[0].values()]
    run.load(tmp_path)
    assert [type(value) for value in run.optimizer.param_groups[0].values()] == before
    rate = run.optimizer.param_groups[0]["lr"]
    assert not isinstance(rate, torch.Tensor) or rate.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """State had kept its type, of which torch's optimizers make an error at the next step."""
    went, on = went_on(tmp_path, made, lambda: made(model=mlp().to(dtype)))
    assert on == pytest.approx(went, rel=1e-5 if dtype == torch.float64 else 0.1)


def sparse(folder: str) -> str:
    run = made(model=Kept(torch.ones(3)))
    run.model.kept = torch.eye(3).to_sparse()
    with pytest.raises(UsageError) as caught:
        run.save(folder)
    return str(caught.value)


def test_what_no_checkpoint_holds_is_refused_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds(2).run(sparse, str(tmp_path)):
        assert message.startswith(
            "pdrun.Run.save: buffers/kept is sparse_coo, which checkpoints do not support"
        )


# ---- damage -----------------------------------------------------------------


@pytest.mark.parametrize("low", [0, storage.BLOCK_BYTES // 4 - 5, 300_000])
def test_a_flipped_bit_is_found_by_who_reads_a_part(low: int, tmp_path: Path) -> None:
    value = torch.arange(2 * storage.BLOCK_BYTES // 4, dtype=torch.float32).view(-1, 64)
    whole = Region(
        tuple(value.shape), tuple(((0, size),) for size in value.shape), 0, value.numel()
    )
    storage.write_rank(tmp_path, 0, [(TensorPiece.for_region("x", value.dtype, whole), value)])
    storage.write_json(
        tmp_path / "run.json", {"format": storage.FORMAT_VERSION, "indices": ["rank-00000.json"]}
    )
    part = Region(whole.shape, whole.ranges, low, low + 10)
    assert torch.equal(
        CheckpointReader(tmp_path).read_tensor("x", part), value.view(-1)[low : low + 10]
    )
    column = Region(whole.shape, (((0, len(value)),), ((3, 5),)), 0, 2 * len(value))
    assert torch.equal(
        CheckpointReader(tmp_path).read_tensor("x", column).view(-1, 2), value[:, 3:5]
    )
    content = bytearray((tmp_path / "rank-00000.bin").read_bytes())
    content[low * 4] ^= 1
    (tmp_path / "rank-00000.bin").write_bytes(content)
    for box in (part, column, whole):
        with pytest.raises(ConfigError, match="x has a wrong checksum"):
            CheckpointReader(tmp_path).read_tensor("x", box)


def damaged(folder: str, level: int) -> tuple[str, str, str, bool]:
    """
    Have one rank fail to read; return what loading, stepping and saving say, and whether an older
    one helps.
    """
    run = made(optimizer_level=level)
    for step in range(2):
        run.step(rows(step))
        run.save(folder)
    if run.state.context.rank == 1:
        new = CheckpointReader(Path(folder) / "step-00000002")
        read = CheckpointReader.read_tensor

        def fails(self: CheckpointReader, name: str, box: Any = None) -> torch.Tensor:
            if self.folder == new.folder and name == "weights/0.weight":
                raise ConfigError(f"{name} has a wrong checksum", where=str(self.folder))
            return read(self, name, box)

        CheckpointReader.read_tensor = fails  # type: ignore[method-assign]
    message = []
    try:
        for call in (lambda: run.load(folder), lambda: run.step(rows()), lambda: run.save(folder)):
            try:
                call()
            except PdrunError as error:
                message.append(str(error))
        run.load(Path(folder) / "step-00000001")
    finally:
        if run.state.context.rank == 1:
            CheckpointReader.read_tensor = read  # type: ignore[method-assign]
    other = made(optimizer_level=level)
    other.load(Path(folder) / "step-00000001")
    return message[0], message[1], message[2], run.step(rows(7)).loss == other.step(rows(7)).loss


@pytest.mark.parametrize("level", [0, 2])
def test_what_one_rank_cannot_read_is_reported_on_all(
    level: int, worlds: Worlds, tmp_path: Path
) -> None:
    """
    One rank had raised, and could go back to an older checkpoint while the others went on with the
    newer.
    """
    for load, step, save, right in worlds(2).run(damaged, str(tmp_path), level):
        assert "weights/0.weight has a wrong checksum" in load
        assert re.match(r"pdrun.Run.step: .*step-00000002 was loaded in part", step)
        assert re.match(r"pdrun.Run.save: .*step-00000002 was loaded in part", save) and right


def elsewhere(folder: str) -> list[str]:
    run = made()
    run.step(rows())
    run.save(folder)
    message = []
    for name in (folder, f"{folder}/step-00000001"):
        mine = (
            Path(name)
            if run.state.context.rank == 0
            else Path(f"{folder}-that-this-rank-lacks") / Path(name).name
        )
        try:
            run.load(mine)
        except ConfigError as error:
            message.append(str(error))
    return message


def test_a_folder_that_one_rank_does_not_see(worlds: Worlds, tmp_path: Path) -> None:
    """The other ranks had gone on without it, or waited for it."""
    for message in worlds(2).run(elsewhere, str(tmp_path / "own")):
        assert len(message) == 2 and all("is not a complete checkpoint" in text for text in message)


# ---- which one --------------------------------------------------------------


def test_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    """
    After a step back the highest number is what was gone back from: `keep` had removed what it had
    just saved.
    """
    run = made()
    for step in range(4):
        run.step(rows(step))
        run.save(tmp_path)
    run.load(tmp_path / "step-00000002")
    want = run.step(rows(9)).loss
    run.load(tmp_path / "step-00000001")
    run.step(rows(8))
    run.step(rows(9))
    run.load(tmp_path / "step-00000002")
    run.save(tmp_path, keep=2)
    assert [path.name for path in storage.list_checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000002",
    ]
    other = made()
    assert other.resume(tmp_path) and other.steps == 2 and other.step(rows(9)).loss == want


def test_two_runs_do_not_replace_each_others_checkpoints(tmp_path: Path) -> None:
    one, two = made(), made(sgd)
    one.step(rows())
    two.step(rows())
    one.save(tmp_path)
    one.save(tmp_path)
    with pytest.raises(UsageError, match="step-00000001 belongs to another run of this process"):
        two.save(tmp_path)
    two.save(tmp_path / "two")
    del one
    two.save(tmp_path)  # nobody has the other one any more


# ---- where the data stand ---------------------------------------------------


@pytest.mark.parametrize("source", ["loader", "iterable"])
@pytest.mark.parametrize("when", ["before the step", "after the step", "after a break"])
def test_a_batch_that_no_step_has_used_is_not_left_out(
    when: str, source: str, tmp_path: Path
) -> None:
    """A loop that saves before its step, or that ends before it, had lost that batch."""
    held = torch.arange(24.0)[:, None].expand(24, 6).clone()
    data: Any = pdrun.Loader(held, 4) if source == "loader" else held.split(4)

    def seen(run: Run, until: int, save: bool) -> list[float]:
        found: list[float] = []
        while run.steps < until:
            for batch in run.data(data):
                if save and when == "before the step" and run.steps == 5:
                    run.save(tmp_path)
                    return found
                if run.steps == until:
                    break
                run.step(batch)
                found.append(float(batch[0, 0]))
        if save:
            run.save(tmp_path)
        return found

    run = made()
    first = seen(run, 5 if when != "after the step" else 6, save=True)
    more = seen(run, 8, save=False)
    other = made()
    assert other.resume(tmp_path)
    assert seen(other, 8, save=False) == more
    assert first + more == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 0.0, 4.0]


# ---- files of weights -------------------------------------------------------


def test_a_buffer_of_another_shape_in_a_file(tmp_path: Path) -> None:
    """It had been stretched to fit."""
    made(model=Kept(torch.ones(1))).export(tmp_path / "one.safetensors")
    with pytest.raises(ConfigError, match=r"kept has shape \(1,\), \(3,\) in this run"):
        made(model=Kept(torch.ones(3))).load_weights(tmp_path / "one.safetensors")


def exported(folder: str, kind: str) -> str | bool:
    dtype = getattr(torch, kind)
    value = torch.arange(3).to(dtype)
    run = made(model=Kept(value.clone()))
    path = Path(folder) / f"{kind}.safetensors"
    try:
        run.export(path)
    except UsageError as error:
        return str(error)
    run.state.data_group.broadcast_first(torch.zeros(()), "that the file is there")
    other = made(model=Kept(torch.zeros(3).to(dtype)))
    other.load_weights(path)
    return bool((other.model.kept.to(torch.float32) == value.to(torch.float32)).all())


def test_types_of_a_file(worlds: Worlds, tmp_path: Path) -> None:
    for kind in ("uint16", "float8_e4m3fn", "int32"):
        assert worlds(2).run(exported, str(tmp_path), kind) == [True, True]
    for message in worlds(2).run(exported, str(tmp_path), "complex64"):
        assert message.startswith(
            "pdrun.Run.export: kept has the type complex64, which safetensors files do not support"
        )


def started(kind: str) -> str | list[float]:
    rank = pdrun.init().rank
    value = torch.eye(3) * (rank + 1)
    kept = value.to_sparse() if kind == "sparse" else value.to(getattr(torch, kind))
    try:
        run = made(model=Kept(kept))
    except UsageError as error:
        return str(error)
    found: list[float] = run.model.kept.to(torch.float32).flatten().tolist()
    return found


@pytest.mark.parametrize("kind", ["uint16", "int16", "float8_e4m3fn", "uint64", "sparse"])
def test_all_ranks_start_with_rank_0s_buffers_of_any_type(kind: str, worlds: Worlds) -> None:
    """Networks do not know all types: it had ended in an error of theirs."""
    for found in worlds(2).run(started, kind):
        if kind == "sparse":
            assert "buffer kept is sparse_coo and cannot be broadcast from rank 0" in found
        else:
            assert found == torch.eye(3).flatten().tolist()


# ---- a save that nobody waits for -------------------------------------------

LAST = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.parallel.test_user_loops import adam, loss, mlp, rows
import pdrun
run = pdrun.parallelize(mlp(), adam, loss)
run.step(rows())
run.save(sys.argv[1], wait=False)
"""


@pytest.mark.parametrize("good", [False, thorough(True)])
def test_a_last_save_that_fails_is_not_silent(good: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder, root = tmp_path / ("kept" if good else "file") / "below", str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", LAST, str(folder), root],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = f"pdrun: error: {folder}/step-00000001 was not saved: pdrun.Run.save: rank 0: "
    assert done.returncode == 0 and (message in done.stderr) == (not good), done.stderr
    assert bool(storage.list_checkpoints(folder)) == good
