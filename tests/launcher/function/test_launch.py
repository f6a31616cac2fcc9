"""`pdrun.launch(fn)`: results in rank order, failures with their cause, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pdrun
from pdrun.errors import ConfigError, DeadlineExceeded, JobFailed, PdrunError, UsageError
from pdrun.launcher.function.transfer import load_call, read_call, write_call
from pdrun.launcher.jobs import registry as jobs
from tests.lib.worker_processes import clean, torch


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """
    No launcher's variables around the call; temporary folders in one place, which must be empty at
    the end.
    """
    environ = clean()
    for name in set(os.environ) - set(environ):
        monkeypatch.delenv(name)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return place


def rank_and(value: object = None, *, other: object = None) -> tuple[int, object, object]:
    return int(os.environ["RANK"]), value, other


def fail_on_one(kind: type[Exception]) -> None:
    if os.environ["RANK"] == "1":
        raise kind("boom")
    time.sleep(60)


def test_results_come_in_rank_order(alone: Path) -> None:
    told = pdrun.launch(rank_and, "a", devices=3, kwargs={"other": {"b": 1}})
    assert told == [(rank, "a", {"b": 1}) for rank in range(3)]
    assert list(alone.iterdir()) == []


def test_lambdas_and_closures_travel_by_value() -> None:
    secret = object.__class__.__name__
    assert pdrun.launch(
        lambda: (secret, os.environ["WORLD_SIZE"], os.environ["MINE"]), env={"MINE": "x"}
    ) == [("type", "1", "x")]


def test_two_simulated_nodes() -> None:
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK")
    told = pdrun.launch(lambda: tuple(os.environ[name] for name in names), nodes=2, devices=2)
    assert told == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")]


@torch
@pytest.mark.torch
def test_the_function_may_join_its_peers() -> None:
    def total() -> float:
        import torch as module

        context = pdrun.init()
        value = module.tensor([context.rank + 1.0])
        module.distributed.all_reduce(value)
        return float(value)

    assert pdrun.launch(total, devices=2) == [3.0, 3.0]


def test_a_failing_rank_raises_with_its_traceback_and_cause(alone: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        pdrun.launch(fail_on_one, KeyError, devices=2, grace=2)
    error = caught.value
    assert time.monotonic() - begin < 20
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.host
    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert 'raise kind("boom")' in error.traceback
    assert "function_worker" not in error.traceback
    assert isinstance(error.__cause__, KeyError)
    assert "KeyError: 'boom'" in str(error)
    assert list(alone.iterdir()) == []


def test_an_exception_that_cannot_be_pickled_leaves_its_traceback() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("odd")

    def fail() -> None:
        raise Odd(1, 2)

    with pytest.raises(JobFailed, match="Odd: odd") as caught:
        pdrun.launch(fail)
    assert caught.value.__cause__ is None


MAIN = """
import pickle, sys
from dataclasses import dataclass
import pdrun

FACTOR = 3

@dataclass
class Pair:
    a: int

def times(x):
    return FACTOR * x

def main():  # a name that the worker's own program has too
    return times(2)

def work(pair):
    home = sys.modules["__main__"]
    again = pickle.loads(pickle.dumps(pair))
    return again == pair, type(again) is Pair is home.Pair, home.times is times, home.FACTOR, main()

if __name__ == "__main__":
    print(pdrun.launch(work, Pair(1)))
"""


def test_what_travels_by_value_is_found_in_main(tmp_path: Path) -> None:
    """pickle and torch.compile look functions and classes up by the name of their module."""
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[(True, True, True, 3, 6)]\n", done.stderr


def test_modules_of_any_class_travel_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    """torch's configurations and packages with late imports are instances of subclasses."""
    (tmp_path / "late_module.py").write_text("value = 7\ninner = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("late_module")
    module.__class__ = type("LateModule", (ModuleType,), {})
    module.inner = type("Inner", (ModuleType,), {})("late_module.inner")
    inner = module.inner
    call = tmp_path / "f.call"
    write_call(call, lambda: (module, inner), (), {}, [])
    function, _, _ = load_call(read_call(call)[1])
    assert function()[0] is module
    assert function()[1] is inner


def test_frames_of_closures_keep_their_file() -> None:
    def inner() -> None:
        raise RuntimeError("inside")  # this very line is in the traceback

    with pytest.raises(JobFailed) as caught:
        pdrun.launch(lambda: inner())
    assert "# this very line is in the traceback" in caught.value.traceback
    assert __file__ in caught.value.traceback


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(42)", 42),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
    ],
)
def test_a_worker_that_leaves_otherwise_keeps_its_code(code: str, expected: int) -> None:
    with pytest.raises(JobFailed) as caught:
        pdrun.launch(exec, code)
    assert (caught.value.exit_code, caught.value.rank) == (expected, 0)


def test_leaving_early_with_zero_is_no_result() -> None:
    with pytest.raises(JobFailed, match="rank 0 ended without returning"):
        pdrun.launch(os._exit, 0)


def test_what_cannot_be_pickled_is_reported_before_the_start(alone: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="the function cannot be pickled"):
        pdrun.launch(lambda: lock)
    with pytest.raises(UsageError, match="the arguments cannot be pickled"):
        pdrun.launch(rank_and, lock)
    assert list(alone.iterdir()) == []


def test_a_result_that_cannot_be_pickled_names_its_type() -> None:
    with pytest.raises(
        JobFailed, match=r"the result of rank 0, of type _thread\.lock, cannot be pickled"
    ):
        pdrun.launch(threading.Lock)


def test_a_result_that_cannot_be_unpickled_is_reported() -> None:
    class Refuses:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    with pytest.raises(PdrunError, match="the result of rank 0 cannot be unpickled: ValueError"):
        pdrun.launch(lambda: Refuses())


def test_mistakes_in_the_call_are_named() -> None:
    with pytest.raises(UsageError, match="must be at least 1, got 0"):
        pdrun.launch(rank_and, devices=0)
    with pytest.raises(
        ConfigError, match=r"launch\(backend=\): npu cannot be used: no /dev/davinciN"
    ):
        pdrun.launch(rank_and, backend="npu")


def test_a_timeout_stops_the_job() -> None:
    with pytest.raises(DeadlineExceeded):
        pdrun.launch(time.sleep, 60, timeout=1, grace=1)


def test_it_works_from_a_thread_and_keeps_the_callers_signal_handlers() -> None:
    before = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    ]
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(pdrun.launch(rank_and, 1)))
    thread.start()
    thread.join(60)
    assert results == [[(0, 1, None)]]
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    ] == before


def test_output_is_shown_when_asked_and_kept_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pdrun.launch(print, "hello", log_dir=tmp_path / "logs")
    assert capsys.readouterr().out == ""
    assert [path.read_text() for path in (tmp_path / "logs").rglob("*.out")] == ["hello\n"]
    assert not (tmp_path / "pdrun-logs").exists()
    pdrun.launch(print, "hello", quiet=False)
    shown = capsys.readouterr().out
    assert "hello\n" in shown
    named = shown.rpartition("logs in ")[2].strip()
    assert [path.read_text() for path in Path(named).rglob("*.out")] == ["hello\n"]


ECHO = """
import os, pdrun, sys
class Full:
    def write(self, text): raise OSError(28, "No space left on device")
    def flush(self): pass
if sys.argv[1] == "full": sys.stdout = Full()
def work():
    os.write(1, "caf\u00e9\\n".encode())
    for _ in range(12): os.write(1, (b"x" * 99 + b"\\n") * 10_000)
    return 7
print(pdrun.launch(work, quiet=False), file=sys.stderr)
"""


@pytest.mark.parametrize("case", ["ascii", "full"])
def test_an_echo_that_fails_does_not_keep_the_workers(tmp_path: Path, case: str) -> None:
    """More output than all pipes and queues on the way hold."""
    (tmp_path / "script.py").write_text(ECHO)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), case],
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stderr == b"[7]\n"
    assert done.stdout.count(b"x" * 99 + b"\n") == (120_000 if case == "ascii" else 0)
    assert (b"caf\\xe9\n" in done.stdout) == (case == "ascii")


def test_a_launcher_that_ends_at_once_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no space for a module >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(
        JobFailed, match="the job ended with exit code 3: no space for a module"
    ) as caught:
        pdrun.launch(
            rank_and, env={"LARGE": "x" * 200_000}
        )  # more than a pipe holds: it is not read to the end
    assert caught.value.exit_code == 3


CALLER = """
import os, pdrun, sys, time
def work(folder):
    with open(f"{folder}/{os.environ['RANK']}.part", "w") as file: file.write(str(os.getpid()))
    os.rename(file.name, f"{folder}/{os.environ['RANK']}.pid")
    time.sleep(60)
try:
    pdrun.launch(work, sys.argv[1], devices=2, grace=2)
except KeyboardInterrupt:
    sys.exit(99)
"""


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 99), (signal.SIGKILL, -9)])
def test_interrupting_or_killing_the_caller_ends_every_worker(
    tmp_path: Path, number: int, expected: int
) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    environ = clean({"TMPDIR": str(tmp_path / "temporary"), "XDG_STATE_HOME": str(tmp_path)})
    caller = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environ)
    try:
        pids = [_pid(tmp_path / f"{rank}.pid") for rank in range(2)]
        caller.send_signal(number)
        assert caller.wait(30) == expected
        for pid in pids:
            _gone(pid)
        _empty(tmp_path / "temporary")
    finally:
        caller.kill()
        caller.wait()


def _pid(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.01)
    return int(path.read_text())


def _gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while True:
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return
        except OSError:
            return
        assert time.monotonic() < deadline, f"worker {pid} outlived its caller"
        time.sleep(0.01)


def _empty(folder: Path) -> None:
    deadline = time.monotonic() + 5
    # torch 2.14 makes the folder of its compiler's cache when it is imported, and keeps it
    while left := [path for path in folder.iterdir() if "torchinductor_" not in path.name]:
        assert time.monotonic() < deadline, f"{left} was left behind"
        time.sleep(0.01)


def test_files_of_the_call_are_private(alone: Path) -> None:
    def look(folder: str) -> list[tuple[str, str]]:
        place = next(Path(folder).iterdir())
        return [(place.name[:13], oct(place.stat().st_mode & 0o777))] + [
            (path.suffix, oct(path.stat().st_mode & 0o777))
            for path in place.iterdir()
            if path.is_file()
        ]

    assert pdrun.launch(look, str(alone)) == [[("pdrun-launch-", "0o700"), (".call", "0o600")]]


def test_a_job_that_keeps_no_logs_leaves_no_entry_behind(tmp_path: Path) -> None:
    pdrun.launch(rank_and)
    with pytest.raises(JobFailed):
        pdrun.launch(exec, "1 / 0")
    assert jobs.list_jobs() == []
    pdrun.launch(rank_and, log_dir=tmp_path / "logs")
    assert [job.log_dir for job in jobs.list_jobs()] == [str(tmp_path / "logs")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"timeout": "10m"},
            r"launch\(timeout=\): must be a number of seconds, got '10m'; give 600 for 10m",
        ),
        ({"timeout": 0}, r"launch\(timeout=\): must be a number of seconds, got 0"),
        ({"timeout": float("nan")}, r"launch\(timeout=\): must be a number of seconds, got nan"),
        ({"grace": None}, r"launch\(grace=\): must be a number of seconds, got None"),
        (
            {"devices": "4"},
            r"launch\(devices=\): must be a whole number, got '4'; give a whole number or 'auto'",
        ),
        ({"nodes": 2.0}, r"launch\(nodes=\): must be a whole number, got 2.0"),
        ({"env": {"A": 1}}, r"launch\(env=\): names and values must be str, got 'A': 1"),
        ({"env": ["A"]}, r"launch\(env=\): must be a mapping of str to str, got \['A'\]"),
        ({"env": {"RANK": "1"}}, r"launch\(env=\): RANK is set by pdrun"),
    ],
)
def test_arguments_of_another_type_are_refused_at_once(
    alone: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pdrun.launch(rank_and, **wrong)  # type: ignore[arg-type]
    assert list(alone.iterdir()) == []


def test_failures_outside_the_users_frames_have_the_same_form() -> None:
    with pytest.raises(
        JobFailed, match=r"rank 0 on \S+ failed: TypeError: .*rank_and\(\) takes"
    ) as caught:
        pdrun.launch(rank_and, 1, 2, 3)
    assert caught.value.traceback.startswith("Traceback (most recent call last):\nTypeError: ")
    with pytest.raises(JobFailed, match=r"rank 0 on \S+ failed: TypeError: the result of rank 0"):
        pdrun.launch(threading.Lock)


def test_the_errors_of_a_call_are_public() -> None:
    assert (pdrun.UsageError, pdrun.ConfigError, pdrun.DeadlineExceeded) == (
        UsageError,
        ConfigError,
        DeadlineExceeded,
    )
