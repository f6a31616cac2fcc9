"""A MindSpore script's own init() finds the workers of a job of pdrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdrun.integrations.mindspore import make_variables
from pdrun.worker_env import WorkerEnv
from tests.lib.worker_processes import clean
from tests.parallel.checkpoint.test_mindspore_wheel import find_wheel

STAND_IN = '''
"""Takes the place of MindSpore: workers leave at their exit, the scheduler waits for all."""
import atexit, os, time
from pathlib import Path

HERE = Path(os.environ["STAND_IN"])

def init():
    name = os.environ["MS_ROLE"] + os.environ["MS_NODE_ID"]
    here = " ".join(os.environ[key] for key in ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM"))
    (HERE / name).write_text(here)
    if os.environ["MS_ROLE"] == "MS_WORKER":
        atexit.register((HERE / f"left{name}").touch)
        return
    end = time.monotonic() + 30
    while len(list(HERE.glob("left*"))) < int(os.environ["MS_WORKER_NUM"]):
        if time.monotonic() > end:
            raise SystemExit(1)
        time.sleep(0.02)
    (HERE / "ended").touch()
'''
SCRIPT = """
import sys
from mindspore.communication import init
init()
print("arguments", sys.argv[1:], __name__, flush=True)
if "fail" in sys.argv:
    raise ValueError("by the script")
"""
WHEEL_SCRIPT = """
import numpy as np
import mindspore
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init
mindspore.set_context(device_target="CPU")
init()
total = ops.AllReduce()(Tensor(np.ones(2, np.float32) * (get_rank() + 1)))
print("rank", get_rank(), "of", get_group_size(), total.asnumpy().tolist(), flush=True)
"""


def start(folder: Path, script: str, *words: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run a script on two workers."""
    (folder / "train.py").write_text(script)
    command = ["-m", "pdrun", "--devices", "2", "-m", "pdrun.integrations.mindspore", "train.py"]
    return subprocess.run(
        [sys.executable, *command, *words],
        env={
            **clean(),
            "PYTHONPATH": os.pathsep.join([path, *sys.path]),
            "STAND_IN": str(folder),
            "GLOG_v": "3",
        },
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


def put_stand_in(folder: Path) -> str:
    package = folder / "packages/mindspore"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "communication.py").write_text(STAND_IN)
    return str(package.parent)


def test_workers_and_scheduler_get_mindspores_variables(tmp_path: Path) -> None:
    ended = start(tmp_path, SCRIPT, "--epochs", "3", path=put_stand_in(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("arguments ['--epochs', '3'] __main__") == 2
    roles = [tmp_path / name for name in ("MS_WORKER0", "MS_WORKER1", "MS_SCHED0")]
    places = {role.read_text() for role in roles}
    assert len(places) == 1 and places.pop().endswith(" 2")
    assert (tmp_path / "ended").exists()  # after all workers have left


def test_a_failing_script_keeps_its_code_and_traceback(tmp_path: Path) -> None:
    ended = start(tmp_path, SCRIPT, "fail", path=put_stand_in(tmp_path))
    assert ended.returncode == 1
    assert "ValueError: by the script" in ended.stderr
    assert "integrations/mindspore.py" not in ended.stderr
    assert "runpy" not in ended.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdrun.integrations.mindspore"]
    for words, text in (
        ([], "a script is missing; pdrun --devices 8 -m pdrun.integrations.mindspore train.py"),
        (["none.py"], "'none.py' does not exist"),
        ([__file__], "there is no job around this process"),
    ):
        ended = subprocess.run(
            [*command, *words],
            env={**clean(), "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 2
        assert text in ended.stderr
        assert ended.stderr.count("\n") == 1


def test_the_schedulers_port_follows_from_the_stores() -> None:
    for store in (1, 10_000, 29_500, 65_535):
        env = WorkerEnv(1, 2, 1, 2, 0, 1, "10.0.0.1", store, "run")
        found = make_variables(env)
        assert found["MS_SCHED_HOST"] == "10.0.0.1"
        assert 10_000 <= int(found["MS_SCHED_PORT"]) < 30_000


@pytest.mark.thorough
@pytest.mark.skipif(find_wheel() is None, reason="MindSpore is not installed")
def test_mindspores_own_init_and_all_reduce(tmp_path: Path) -> None:
    ended = start(tmp_path, WHEEL_SCRIPT, path=str(find_wheel()))
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 [3.0, 3.0]" in ended.stdout
