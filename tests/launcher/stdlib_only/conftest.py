"""
A keeper with a starter that has imported torch, once a module of tests, and programs run both ways
from it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdrun.launcher.plan.model import StartMethod
from pdrun.launcher.plan.start_method import BASE_MODULES, fork_server_command
from pdrun.launcher.supervisor import warm_client, warm_start
from pdrun.launcher.supervisor.events import (
    Exited,
    ForkServerStatus,
    Spawned,
    SpawnFailed,
    WarmProcess,
    WorkerCommand,
)
from tests.lib.agent_fakes import make_plan
from tests.lib.supervisor_driver import SupervisorDriver, supervisor_driver

pytest.importorskip("torch")


@dataclass
class Ended:
    """How a program went."""

    code: int
    out: str
    err: str


class Bench:
    """Runs programs, forked from the starter or executed, and waits for them."""

    def __init__(self, driver: SupervisorDriver, modules: tuple[str, ...] = BASE_MODULES) -> None:
        self.driver, self.slots = driver, 0
        self.modules = modules
        self.env = {**plain_environment(), "OMP_NUM_THREADS": "1", "RANK": "0"}

    def start(
        self,
        argv: tuple[str, ...],
        out: int,
        err: int,
        *,
        start: str = "fork",
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        cpus: tuple[int, ...] = (),
        stdin: int | None = None,
    ) -> int:
        """Start a program; return its slot."""
        self.slots += 1
        null = os.open(os.devnull, os.O_RDWR)
        command = WorkerCommand(self.slots, argv, {**self.env, **(env or {})}, cwd, cpus, start)
        self.driver.supervisor.spawn(command, null if stdin is None else stdin, out, err)
        os.close(null)
        return self.slots

    def run(
        self,
        *argv: str,
        start: str = "fork",
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        cpus: tuple[int, ...] = (),
        python: bool = True,
        stdin: int | None = None,
    ) -> Ended:
        """Run ``python ARGV`` to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            words = (sys.executable, *argv) if python else argv
            slot = self.start(
                words,
                out.fileno(),
                err.fileno(),
                start=start,
                env=env,
                cwd=cwd,
                cpus=cpus,
                stdin=stdin,
            )
            code = os.waitstatus_to_exitcode(self.driver.wait(Exited, slot, 60).status)
            self.driver.events = [event for event in self.driver.events if event.slot != slot]
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return Ended(code, *texts)

    def refused(self, *argv: str, cwd: str = "/", cpus: tuple[int, ...] = ()) -> SpawnFailed:
        """The keeper's word on a program that could not become one."""
        null = os.open(os.devnull, os.O_RDWR)
        slot = self.start((sys.executable, *argv), null, null, cwd=cwd, cpus=cpus)
        os.close(null)
        return self.driver.wait(SpawnFailed, slot)

    def both(self, *argv: str, **more: object) -> tuple[Ended, Ended]:
        """Run a program forked and executed."""
        return self.run(*argv, **more), self.run(*argv, start="exec", **more)

    def pid(self, slot: int) -> int:
        """The pid of a program that was started."""
        return self.driver.wait(Spawned, slot, 30).pid


def plain_environment() -> dict[str, str]:
    """What the tests' own environment has that an interpreter needs."""
    return {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ
    }


def starter_of(
    env: Mapping[str, str], modules: tuple[str, ...] = BASE_MODULES, python: str = sys.executable
) -> WorkerCommand:
    """The command of a starter for workers with this environment."""
    plan = make_plan(1, argv=(python, "x" * 200), kind="script")
    return fork_server_command(
        replace(plan, base_env=dict(env), start_method=StartMethod("fork", modules=modules))
    )


@contextlib.contextmanager
def warm_process(
    folder: Path,
    env: Mapping[str, str],
    modules: tuple[str, ...] = BASE_MODULES,
    idle: float = 600.0,
    python: str = sys.executable,
) -> Iterator[WarmProcess]:
    """A warm process in a folder of its own, ended at the end."""
    name = f"{warm_start.warm_key(python, env)}.sock"
    with pytest.MonkeyPatch.context() as patch, warm_start.locked_dir(folder, print) as number:
        patch.setattr(warm_start, "WARM_MODULES", modules)
        warm_start.start_warm(number, folder / name, python, env, idle)
    found = said(folder)
    try:
        yield found
    finally:
        warm_start.stop_warm(found)


def said(folder: Path) -> WarmProcess:
    """What the only warm process of a folder says of itself."""
    look = warm_client.WarmScan({"XDG_RUNTIME_DIR": str(folder.parent)})
    assert look.path == folder
    (found,) = look.collect_answers()
    assert not look.faults
    return found


@pytest.fixture(scope="package")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """A warm process for the benches of all modules: its imports take seconds."""
    folder = tmp_path_factory.mktemp("warm") / "pdrun"
    env = {**plain_environment(), "OMP_NUM_THREADS": "1", "RANK": "0"}
    with warm_process(folder, env, warm_start.WARM_MODULES) as found:
        yield found


@pytest.fixture(scope="module", params=["cold", "warm"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """
    One starter for the tests of a module: the job's own, or one that was forked from a warm
    process.
    """
    env = {**plain_environment(), "OMP_NUM_THREADS": "1", "RANK": "0"}
    with contextlib.ExitStack() as stack:
        lent = None
        if request.param == "warm":
            lent = warm_client.borrow_supervisor(request.getfixturevalue("warm").socket)
        driver = stack.enter_context(supervisor_driver(lent))
        driver.supervisor.start_fork_server(starter_of(env))
        assert driver.wait(ForkServerStatus, None, 60).why == ""
        yield Bench(driver, BASE_MODULES if lent is None else warm_start.WARM_MODULES)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test writes its program."""
    return tmp_path / "prog.py"
