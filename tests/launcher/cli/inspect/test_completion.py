"""What TAB offers: values, jobs, ranks and hosts; and the files that ``install`` writes."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from pdrun.launcher.cli.commands import build_command_line
from pdrun.launcher.cli.inspect.manual import escape_roff, format_manual
from pdrun.launcher.jobs.registry import make_job_record, register_job
from tests.launcher.cli.conftest import Outcome

RUNS = ("train-20260101-120000-00aa", "train-20260102-120000-00ab", "eval-20260101-130000-00ac")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with three jobs; the newest run of ``train`` has logs of two generations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for run in RUNS:
        record = make_job_record(
            run, run.split("-")[0], events="", log_dir=str(tmp_path / "logs"), made=1.0
        )
        assert register_job(record)
    for generation, ranks in ((0, 4), (1, 3)):
        folder = tmp_path / "logs" / RUNS[1] / str(generation)
        folder.mkdir(parents=True)
        for rank in range(ranks):
            (folder / f"rank_{rank}.out").touch()
            (folder / f"rank_{rank}.err").touch()
    return tmp_path


def offered(*words: str) -> list[str]:
    """Return what is offered for the last word."""
    complete = BashComplete(build_command_line(), {}, "pdrun", "_PDRUN_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--prefix", ""), ["auto", "rank", "none"]),
        (("--screen", "l"), ["line"]),
        (("run", "--start", "f"), ["fork"]),
        (("run", "--backend", "cu"), ["cuda"]),
        (("--show-ranks", "a"), ["all"]),
        (("status", ""), ["train", "eval"]),
        (("logs", "train-20260102"), [RUNS[1]]),
        (("stop", "e"), ["eval", RUNS[2]]),
        (("report", "x"), []),
        (("plot", "eval", "tr"), ["train", RUNS[1], RUNS[0]]),
        (("logs", "train", "--ranks", ""), ["0", "1", "2", "all"]),
        (("logs", "train", "--ranks", "0,"), ["0,1", "0,2"]),
        (("export", "--to", "t"), ["tensorboard"]),
        (("doctor", "--only", "disk,po"), ["disk,ports"]),
        (("tra",), ["tra", "trace", "translate"]),
        (("train",), ["train"]),
        (("completion", "f"), ["fish"]),
        (("completion", "install", "z"), ["zsh"]),
    ],
)
def test_values(words: tuple[str, ...], found: list[str], home: Path) -> None:
    assert offered(*words) == found


def test_hosts_of_a_hostfile_and_of_ssh(home: Path) -> None:
    (home / "hostfile").write_text("node0 slots=8\n# node9\nnode1:8\n\x1b[2J slots=1\n$(id)\n")
    (home / "other").write_text("gpu7\n")
    (home / ".ssh").mkdir()
    (home / ".ssh/config").write_text("Host login *.lan\n  User me\n")
    assert offered("--hosts", "") == ["node0", "node1", "login"]
    assert offered("--hosts", "node0,n") == ["node0,node1"]
    assert offered("--hostfile", "other", "--include", "g") == ["gpu7"]


def test_hostile_names_are_not_offered(home: Path) -> None:
    jobs = home / ".local/state/pdrun/jobs"
    for name in ("$(touch x)", "a b", "\x1b[2J", "\u202eevil", "-rf"):
        (jobs / f"{name}.json").write_text("{}")
    assert offered("status", "") == ["train", "eval"]


def put_program(home: Path) -> Path:
    """Write a program ``pdrun`` and return its folder."""
    program = home / "bin/pdrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pdrun "$@"\n')
    program.chmod(0o755)
    return program.parent


def test_bash_gets_the_names_of_commands_that_others_get_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = offered("")
    monkeypatch.setenv("_PDRUN_COMPLETE", "bash_complete")
    assert offered("") == described
    assert {"doctor", "k8s"} < set(described)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself(home: Path) -> None:
    script = (
        f'PATH="{put_program(home)}:$PATH"\n'
        'eval "$(pdrun completion bash)"\n'
        "COMP_WORDS=(pdrun status ev); COMP_CWORD=2; _pdrun_completion pdrun\n"
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["eval", RUNS[2]], done.stderr


LINES = {
    "pdrun status ev": ("eval", RUNS[2]),
    "pdrun logs train --ranks 0,": ("0,1", "0,2"),
    "pdrun doctor --only disk,po": ("disk,ports",),
    "pdrun --backend=": ("auto", "cuda"),
    "pdrun --hosts=node0,": ("node0,node1",),
    "pdrun tra": ("trace", "translate", "train.py"),
    "pdrun train.": ("train.py",),
    "pdrun --nodes 2 train.": ("train.py",),
    "pdrun --log-dir=lo": ("logs/",),
    "pdrun ": ("doctor", "train.py"),
}
"""What is typed, and some of what is offered."""


PROMPT = "ready> "


def wait_for_text(terminal: int, *texts: str) -> None:
    """Read a terminal until it has shown all texts."""
    shown, end = "", time.monotonic() + 60
    while not all(text in shown for text in texts):
        assert time.monotonic() < end, (texts, shown)
        if select.select([terminal], [], [], 0.2)[0]:
            shown += re.sub(r"[\x00-\x1f]", "", os.read(terminal, 65536).decode(errors="replace"))


@pytest.fixture
def files(home: Path) -> Path:
    (home / "train.py").touch()
    (home / "hostfile").write_text("node0\nnode1\n")
    return home


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_itself(files: Path) -> None:
    script = [f'set -x PATH "{put_program(files)}" $PATH', "pdrun completion fish | source"]
    script += [f"echo '> {line}'; complete -C '{line}'" for line in LINES]
    done = subprocess.run(
        ["fish", "-c", "\n".join(script)], capture_output=True, text=True, timeout=120
    )
    found = dict(part.split("\n", 1) for part in done.stdout.split("> ")[1:])
    for line, values in LINES.items():
        offers = {item.split("\t")[0] for item in found[line].splitlines()}
        before = line.rpartition(" ")[2].partition("=")[0] + "=" if "=" in line else ""
        assert {before + value for value in values} <= offers, (line, done.stderr)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_itself(files: Path, pdrun: Callable[..., Outcome]) -> None:
    """A zsh at a terminal, whose startup file has the line of ``install`` only."""
    path = f"{put_program(files)}:{os.environ['PATH']}"
    assert pdrun("completion", "install", "zsh").code == 0
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": PROMPT}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-d", "-i"], environment)
    try:
        wait_for_text(terminal, PROMPT)
        for line, values in LINES.items():
            os.write(terminal, f"{line}\t\t".encode())
            wait_for_text(terminal, *values)
            os.write(terminal, b"\x15\n")
            wait_for_text(terminal, PROMPT)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install(shell: str, home: Path, pdrun: Callable[..., Outcome]) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    os.chdir(home)
    startup = home / f".{shell}rc"
    startup.write_text("alias x=y")
    for _ in range(2):
        assert pdrun("completion", "install", shell).code == 0
    text = startup.read_text()
    assert text.startswith("alias x=y") and text.count("pdrun completion") == (shell != "fish")
    code = (
        home
        / ".config"
        / ("fish/completions/pdrun.fish" if shell == "fish" else f"pdrun/completion.{shell}")
    )
    assert "_PDRUN_COMPLETE" in code.read_text()
    assert (home / ".local/share/man/man1/pdrun.1").read_text().startswith(".TH PDRUN 1")


def test_what_cannot_be_installed(
    home: Path, pdrun: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    done = pdrun("completion", "install")
    assert done.code == 2 and "no completion for shell 'tcsh'" in done.err
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    done = pdrun("completion", "install", "fish")
    assert done.code == 78 and "/proc/none/fish" in done.err
    assert pdrun("completion", "tcsh").code == 2


def test_the_manual_has_what_help_has() -> None:
    page = format_manual(build_command_line())
    for text in (r"\-\-max\-restarts", "pdrun k8s submit", "pdrun checkpoint show", "PDRUN_NODES"):
        assert text in page
    assert all(line.isprintable() for line in page.splitlines())
    assert escape_roff(".TH x\\") == "\\&.TH x\\e"


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_man_reads_it(tmp_path: Path) -> None:
    (tmp_path / "pdrun.1").write_text(format_manual(build_command_line()))
    done = subprocess.run(
        ["man", "--warnings", "-l", "pdrun.1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "MANWIDTH": "80", "PAGER": "cat"},
        timeout=60,
    )
    assert "--hang-timeout" in done.stdout.replace("\u2010", "-")
    assert done.stderr == ""
