"""The examples and benchmarks of the parallel runtime run as their first lines say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.tiers import is_thorough
from tests.lib.worker_processes import clean, run_program

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples/train_gpt_parallel.py")
SMALL = [
    "--steps",
    "12",
    "--batch",
    "12",
    "--context",
    "16",
    "--width",
    "32",
    "--layers",
    "2",
    "--log-every",
    "4",
]

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=170,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[str]:
    return re.findall(r"step +\d+/12  loss (\d\.\d{6})", text)


def test_the_gpt_has_the_same_losses_on_any_number_of_workers(tmp_path: Path) -> None:
    """
    Slices are equal: 6 on one process, 2 x 3; between them a run stops and goes on from its
    checkpoint.
    """
    want = losses(run_program(tmp_path, Path(GPT), *SMALL, "--accumulate", "6", "--verify"))
    assert len(want) == 3
    job = ["-m", "pdrun", "--no-files", "--prefix", "none", "--devices", "2"]
    folder = str(tmp_path / "checkpoints")
    options = ["--accumulate", "3", "--level", "3", "--recompute", "full", "--checkpoints", folder]
    assert losses(run(*job, GPT, *SMALL, *options, cwd=tmp_path)) == want
    if is_thorough():
        again = run(GPT, *SMALL, "--accumulate", "6", "--checkpoints", folder)
        assert "goes on after step 12" in again


@pytest.mark.thorough
def test_the_gpt_trains_in_bf16() -> None:
    assert len(losses(run(GPT, *SMALL, "--precision", "bf16", "--level", "1"))) == 3


def test_the_llama_has_the_same_losses_however_it_is_cut(tmp_path: Path) -> None:
    program = [
        str(ROOT / "examples/train_llama_tensor.py"),
        "--steps",
        "20",
        "--context",
        "16",
        "--width",
        "32",
    ]
    job = ["-m", "pdrun", "--no-files", "--prefix", "none", "--devices", "2"]
    told = run(*job, *program, "--tp", "2", "--sequence", "--verify", cwd=tmp_path)
    assert "gradients within" in told  # of those of one process
    (loss,) = re.findall(r"step +20/20  loss (\d\.\d{4})", told)
    if is_thorough():
        assert re.findall(r"step +20/20  loss (\d\.\d{4})", run(*program)) == [loss]


@pytest.mark.thorough
def test_the_gpt_generates_the_same_text_however_it_is_cut(tmp_path: Path) -> None:
    run(GPT, *SMALL[:2], *SMALL[4:], "--batch", "2", "--checkpoints", str(tmp_path / "c"))
    program = [str(ROOT / "examples/generate.py"), "--weights", str(tmp_path / "c")]
    program += ["--width", "32", "--new", "12", "--temperature", "0.9"]
    want = run(*program).partition("mesh(")[0]
    assert want.count("--\n") == 4
    job = ["-m", "pdrun", "--no-files", "--prefix", "none", "--devices", "2", "--backend", "cpu"]
    told = run(*job, *program, "--tp", "2", "--verify", cwd=tmp_path)
    assert want in told
    assert "of those of one process" in told


@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
@pytest.mark.thorough
def test_digits_are_classified() -> None:
    text = run(str(ROOT / "examples/classify_digits.py"))
    assert text.count("epoch") == 10
    assert float(text.partition("right: ")[2].split()[0]) > 90


def test_weights_sharded_by_hand_train_as_whole_ones(tmp_path: Path) -> None:
    script = ROOT / "examples/manual_parallel.py"
    job = ("-m", "pdrun", "--devices", "3", "--backend", "cpu", "--no-files")
    losses = [
        re.findall(r"step \d+: loss (\d\.\d{4})", text)
        for text in (run_program(tmp_path, script), run(*job, str(script)))
    ]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


RESTARTED = """
import os, signal, sys
import torch.optim  # so that what it needs is imported once, in the process that forks the workers
sys.path.insert(0, {root!r})
import pdrun
from tests.lib import small_models as zoo
context = pdrun.init()
run = zoo.make(zoo.Case(2, 3, dropout=True))
run.resume({folder!r})
while run.steps < 6:
    m = run.step(zoo.batch_of(24, run.steps))
    run.save({folder!r}, keep=2)
    if run.steps == 4 and context.restart_count == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.is_main:
        print("LOSS", run.steps, repr(m.loss), flush=True)
"""


def undisturbed() -> list[str]:
    """Return what the script prints if nobody dies."""
    made = zoo.make(zoo.Case(2, 3, dropout=True))
    told = [made.step(zoo.batch_of(24, step)) for step in range(6)]
    return [f"LOSS {step} {one.loss!r}" for step, one in enumerate(told, 1)]


def test_a_job_that_is_started_again_goes_on_by_itself(tmp_path: Path, worlds: Worlds) -> None:
    """Rank 1 is killed after step 4; the restarted job prints what an undisturbed one does."""
    script = tmp_path / "train.py"
    script.write_text(RESTARTED.format(root=str(ROOT), folder=str(tmp_path / "to")))
    job = ["-m", "pdrun", "--no-files", "--prefix", "none", "--devices", "2", "--max-restarts", "1"]
    lines = run(*job, str(script), cwd=tmp_path).splitlines()
    found, want = [line for line in lines if line.startswith("LOSS")], worlds(2).run(undisturbed)[0]
    assert found[-2:] == want[-2:]
    assert set(found) <= set(want)


@pytest.mark.thorough
def test_the_gpu_benchmark_on_a_tiny_model() -> None:
    text = run(
        str(ROOT / "benchmarks/parallel_gpu.py"),
        "--tiny",
        "--devices",
        "2",
        "--backend",
        "cpu",
        "--steps",
        "2",
        "--warm",
        "1",
        "--rows",
        "ddp-eager,pdrun0-eager,pdrun3-fused-eager",
    )
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["ddp-eager", "pdrun0-eager", "pdrun3-fused-eager"]
    assert all(abs(float(row[5]) - float(rows[0][5])) < 2e-4 for row in rows)  # the first loss
    assert all(abs(float(row[6]) - float(rows[0][6])) < 2e-3 for row in rows)


def test_experts_have_the_same_losses_on_two_ranks(tmp_path: Path) -> None:
    program = ROOT / "examples/train_moe.py"
    job = ("-m", "pdrun", "--devices", "2", "--backend", "cpu")
    found = [
        re.findall(r"step +\d+/3  loss (\d\.\d{5})  busiest (\d\.\d\d)", text)
        for text in (
            run_program(tmp_path, program, "--steps", "3"),
            run(*job, str(program), "--steps", "3"),
        )
    ]
    assert len(found[0]) == 3
    assert found[0] == found[1]
