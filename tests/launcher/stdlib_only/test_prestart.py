"""
What is started before the command line is read: only what the plan would start, and never more than
that.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

from pdrun.errors import PdrunError
from pdrun.launcher.cli import run as cli_run
from pdrun.launcher.config import aliases, run_options
from pdrun.launcher.config.options import Option
from pdrun.launcher.launch import prestart
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import fork_server_command
from pdrun.launcher.stdlib_only import fork_client, process_tree
from pdrun.launcher.supervisor import boot
from pdrun.launcher.supervisor.client import SupervisorProcess
from pdrun.launcher.supervisor.events import ForkServerStatus, WorkerCommand
from tests.e2e.conftest import until

TORCH = "import torch\n"
RUN = cli_run.run_command()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with scripts, where no option of pdrun and no warm process is around."""
    (tmp_path / "train.py").write_text(TORCH)
    (tmp_path / "adam.py").write_text(TORCH + "torch.optim.Adam\n")
    (tmp_path / "plain.py").write_text("print()\n")
    (tmp_path / "late.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n" + TORCH)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PDRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    yield tmp_path
    prestart.discard()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train.py", "train.py"),
        ("run train.py", "train.py"),
        ("--devices 2 train.py --local", "train.py"),
        ("--nproc_per_node=2 --standalone train.py adam.py", "train.py"),
        ("--no-warm adam.py", "adam.py"),
        ("", None),
        ("missing.py", None),
        ("--devices 2", None),
        ("status train.py", None),
        ("warm start", None),
        ("--dry-run train.py", None),
        ("--help train.py", None),
        ("-m train.py", None),
        ("--local train.py", None),
        ("--python /usr/bin/python3 train.py", None),
        ("--start=exec train.py", None),
        ("--hosts a,b train.py", None),
        ("--env A=b train.py", None),
        ("--no_python train.py", None),
        ("job.yaml", None),
        ("run job.yaml train.py", None),
        ("--role r train.py", None),
        ("-.py", None),
        (".", None),
    ],
)
def test_what_is_guessed_from_the_words(words: str, found: str | None) -> None:
    listed = words.split()
    place = prestart.find_script_argument(listed, os.environ)
    assert (None if place is None else listed[place]) == found


def test_options_in_the_environment_and_warm_processes_are_not_guessed_at(folder: Path) -> None:
    assert prestart.find_script_argument(["train.py"], {"PDRUN_START": "exec"}) is None
    assert prestart.find_script_argument(["train.py"], {"PDRUN_TOKEN": "x"}) == 0
    assert prestart.find_script_argument(["train.py"], {"LD_PRELOAD": "/lib/tool.so"}) is None
    around = {"XDG_RUNTIME_DIR": str(folder / "run")}
    (folder / "run" / "pdrun").mkdir(parents=True)
    assert prestart.find_script_argument(["train.py"], around) == 0
    (folder / "run" / "pdrun" / "0123.sock").touch()
    assert prestart.find_script_argument(["train.py"], around) is None
    assert prestart.find_script_argument(["--no-warm", "train.py"], around) == 1


@pytest.mark.parametrize(("most", "found"), [(63, None), (64, 0), (resource.RLIM_INFINITY, 0)])
def test_with_few_descriptors_nothing_is_guessed(
    most: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complaint about the limit is then the only thing that happens."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    assert prestart.find_script_argument(["train.py"], {}) == found


def planned(words: list[str]) -> LaunchPlan:
    """What ``pdrun WORDS`` plans here."""
    context = RUN.make_context("run", list(words))
    request = cli_run.parse_request(context.params, context.params["words"], {})
    return cli_run.plan_job(request.resolved)[0]


SAMPLES = {
    "N": "2",
    "TIME": "9s",
    "N|auto": "2",
    "N|MIN:MAX": "2",
    "FILE": "file",
    "HOST:PORT": "127.0.0.1:1",
}


@pytest.mark.parametrize(
    "row", [*run_options.RUN_OPTIONS, *aliases.ALIAS_OPTIONS], ids=lambda row: row.names[0]
)
def test_every_option_that_changes_the_start_of_workers_is_known(row: Option, folder: Path) -> None:
    """
    With any other option the guess is what the plan asks for, or the command line is refused with
    that value.
    """
    (folder / "file").touch()
    for name in row.names:
        for value in (
            {SAMPLES.get(row.metavar, "x"), "2", "1,2", "none", "127.0.0.1:1"}
            if row.metavar
            else {""}
        ):
            words = [name, *([value] if row.metavar else []), "--backend", "cpu", "train.py"]
            if name == "--backend" or name in prestart.EXCLUDING_OPTIONS:
                continue
            try:
                plan = planned(words)
            except (PdrunError, click.ClickException):
                continue
            guessed = prestart.guess_command(["train.py"], os.environ)
            if plan.start_method.how == "fork" and plan.workers:
                wanted = fork_server_command(plan)
                assert guessed == (list(wanted.argv), dict(wanted.env), wanted.cwd), words


@pytest.mark.parametrize("script", ["train.py", "adam.py", "plain.py", "late.py"])
@pytest.mark.parametrize(
    "given",
    [[], ["--devices", "3", "--threads", "2"], ["--nodes", "2", "--scheduler", "127.0.0.1:1"]],
)
def test_the_guess_is_what_the_plan_asks_for(
    script: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")  # is scrubbed
    words = [script, "--lr", "0.1", "x" * 300]
    plan = planned([*given, "--backend", "cpu", *words])
    guessed = prestart.guess_command(words, os.environ)
    assert (
        (guessed is not None)
        == (plan.start_method.how == "fork")
        == (script in ("train.py", "adam.py"))
    )
    if guessed is not None:
        wanted = fork_server_command(plan)
        assert guessed == (list(wanted.argv), dict(wanted.env), wanted.cwd)


def running(pid: int) -> bool:
    found = process_tree.find_process(pid)
    return found is not None and found.state not in "ZX"


def begun() -> tuple[int, int]:
    """Begin; return the pids of keeper and starter."""
    prestart.start(["train.py"])
    assert prestart._prestart is not None
    keeper = process_tree.find_process(prestart._prestart.pid)
    assert keeper is not None

    def starters() -> list[int]:
        return [
            child.pid for child in process_tree.list_children(keeper) if "fork_server" in str(child)
        ]

    until(lambda: len(starters()) == 1, "the starter runs", 20)
    return keeper.pid, starters()[0]


def test_a_keeper_has_a_session_of_its_own_from_the_first_moment() -> None:
    """A Ctrl-C at the terminal would meet an interpreter that is starting: with a traceback."""
    pid, connection = boot.start_supervisor(sys.executable)
    assert os.getsid(pid) == pid
    connection.close()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_stopped_keeper_is_ended_as_well() -> None:
    pids = begun()
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    prestart.discard()
    assert time.monotonic() - started < prestart.EXIT_SECONDS and not any(map(running, pids))


def test_what_the_plan_asks_for_is_taken_over() -> None:
    pids = begun()
    assert prestart._prestart is not None and prestart._prestart.command is not None
    argv, env, cwd = prestart._prestart.command
    wanted = WorkerCommand(-1, tuple(argv), env, cwd)
    found = prestart.claim(wanted)
    assert found is not None and prestart.claim(wanted) is None
    keeper = SupervisorProcess(prestart=found)
    try:
        keeper.start_fork_server(wanted)  # starts no second one
        told: list[object] = []

        def ready() -> bool:
            told.extend(keeper.read_events())
            return bool(told)

        until(ready, "it is ready", 60)
        assert (
            told == [ForkServerStatus(fork_client.FORK_SERVER_SLOT, "")] and keeper.pid == pids[0]
        )
    finally:
        keeper.close()
    assert not any(map(running, pids))


@pytest.mark.parametrize("change", ["argv", "env", "cwd"])
def test_what_differs_is_ended_before_anything_else_starts(change: str) -> None:
    pids = begun()
    assert prestart._prestart is not None and prestart._prestart.command is not None
    argv, env, cwd = prestart._prestart.command
    wanted = WorkerCommand(-1, tuple(argv), env, cwd)
    others = {
        "argv": {"argv": (*argv[:-1], "-")},
        "env": {"env": {**env, "A": "b"}},
        "cwd": {"cwd": "/"},
    }
    assert prestart.claim(replace(wanted, **others[change])) is None  # type: ignore[arg-type]
    assert not any(map(running, pids))


MISTAKE = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)
done = subprocess.run([sys.executable, "-m", "pdrun", *sys.argv[1:]], capture_output=True, text=True)
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = "nothing"
print(done.returncode, left, done.stderr)
"""


@pytest.mark.parametrize(
    ("words", "code"), [("--devices x train.py", 2), ("--nonsense train.py", 2)]
)
def test_a_mistake_leaves_nothing_behind(words: str, code: int) -> None:
    """The keeper has ended when pdrun has; a test's sub-reaper would get it otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", MISTAKE, *words.split()], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"{code} nothing pdrun: error: "), done.stdout + done.stderr
