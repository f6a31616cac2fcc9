"""Loops of other libraries on a run: the numbers are those of plain torch in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pdrun.errors import UsageError
from pdrun.integrations.accelerate import Accelerator
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.worker_processes import clean

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]
ROWS, BATCH = 19, 8


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*zoo.batch_of(ROWS, 5)), batch_size=BATCH)


def loop_of_accelerate(level: int) -> Any:
    """Train two epochs and evaluate with a loop written for accelerate."""
    accelerator = Accelerator(optimizer_level=level)
    made = zoo.OPTIMIZERS["SGD"](zoo.build().parameters()) if level < 0 else zoo.OPTIMIZERS["SGD"]
    model, optimizer, train = accelerator.prepare(zoo.build(), made, loader())
    norms = []
    for _ in range(2):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            loss = zoo.token_loss(model(batch[0]), batch)
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
    model.eval()
    rows = []
    for batch in train:
        with torch.no_grad():
            output = model(batch[0])
        rows.append(accelerator.gather_for_metrics((output.argmax(-1), batch[1])))
    weights = {name: value.tolist() for name, value in accelerator.run.full_weights().items()}
    return norms, weights, [torch.cat(column).tolist() for column in zip(*rows, strict=True)]


def plain_loop() -> Any:
    model = zoo.build()
    optimizer = zoo.OPTIMIZERS["SGD"](model.parameters())
    norms = []
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            total, count = zoo.token_loss(model(batch[0]), batch)
            (total / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
    with torch.no_grad():
        found = model.eval()(zoo.batch_of(ROWS, 5)[0]).argmax(-1)
    return norms, dict(model.named_parameters()), found.tolist()


@pytest.mark.parametrize("level", [0, 3])
def test_a_loop_of_accelerate_trains_as_plain_torch(level: int, worlds: Worlds) -> None:
    norms, weights, found = plain_loop()
    for told in worlds(2).run(loop_of_accelerate, level):
        assert told[0] == pytest.approx(norms, rel=1e-4)
        for name, value in told[1].items():
            want = weights[name].detach()
            torch.testing.assert_close(torch.tensor(value), want, rtol=1e-3, atol=1e-5)
        assert told[2] == [found, zoo.batch_of(ROWS, 5)[1].tolist()]


def prepared() -> Any:
    accelerator = Accelerator()
    parts = accelerator.prepare(zoo.build(), zoo.OPTIMIZERS["SGD"], loader())
    return accelerator, *parts


def test_what_a_loop_does_in_another_order_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pipeline is not an option.*run\.step"):
        Accelerator(pipeline=1)
    with pytest.raises(UsageError, match="comes first"):
        _ = Accelerator().run
    with pytest.raises(UsageError, match="needs the model first, got list"):
        Accelerator().prepare([], None)
    accelerator, model, optimizer, train = prepared()
    batch = next(iter(train))
    with pytest.raises(UsageError, match="step comes after accelerator"):
        optimizer.step()
    with pytest.raises(UsageError, match="comes after backward"):
        accelerator.clip_grad_norm_([], 1.0)
    model(batch[0])
    with pytest.raises(UsageError, match="called twice in a step"):
        model(batch[0])
    with pytest.raises(UsageError, match="prepare was called before"):
        accelerator.prepare(zoo.build(), None)


# ---- libraries --------------------------------------------------------------


def run_example(name: str, *args: str, devices: int, folder: Path) -> list[str]:
    env = clean()
    extra = os.environ.get("PYTEST_PDRUN_FRAMEWORKS", "")
    if extra:
        env["PYTHONPATH"] = extra
    command = [sys.executable, "-m", "pdrun", "--no-files", "--prefix", "none", "--devices"]
    done = subprocess.run(
        [*command, str(devices), str(ROOT / "examples" / name), *args],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "loss" in line]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("package", "name"), [("lightning", "lightning_fit.py"), ("accelerate", "trainer_fit.py")]
)
def test_an_example_has_the_same_losses_on_two_ranks(
    package: str, name: str, tmp_path: Path
) -> None:
    """The Trainer of transformers needs accelerate."""
    extra = os.environ.get("PYTEST_PDRUN_FRAMEWORKS", "")
    if not extra or not (Path(extra) / package).is_dir():
        pytest.importorskip(package)
    told = [
        run_example(name, devices=devices, folder=tmp_path / f"of{devices}")
        for devices in (1, 2)
        if (tmp_path / f"of{devices}").mkdir() is None
    ]
    numbers = [
        [float(x) for x in re.findall(r"loss\S* (\d+\.\d+)", "\n".join(lines))] for lines in told
    ]
    assert len(numbers[0]) >= 3 and numbers[0][-1] < numbers[0][0]
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-4)
