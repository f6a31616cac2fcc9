"""Where the live line is shown, and which log it reads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdrun.launcher.config.spec import Output
from pdrun.launcher.jobs.registry import make_job_record, register_job
from pdrun.launcher.jobs.views import live_screen
from pdrun.launcher.output.console import Console


@pytest.mark.parametrize(
    ("tty", "screen", "environ", "wanted"),
    [
        ((True, True), "auto", {}, True),
        ((True, True), "auto", {"NO_COLOR": "1"}, True),
        ((True, True), "none", {}, False),
        ((True, True), "auto", {"CI": "true"}, False),
        ((True, True), "line", {"CI": "true"}, True),
        ((False, True), "auto", {}, False),  # pdrun ... | less
        ((False, True), "line", {}, True),
        ((True, False), "line", {}, False),
        ((True, True), "line", {"TERM": "dumb"}, False),
    ],
)
def test_where_it_is_shown(
    tty: tuple[bool, bool], screen: str, environ: dict[str, str], wanted: bool
) -> None:
    console = Console(tty=tty, environ=environ)
    assert live_screen.is_line_wanted(console, screen, environ) is wanted


def test_no_thread_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(live_screen, "LiveScreen", fail)
    live_screen.show_live_line(Console(tty=(True, True)), Output(files=False), environ={})
    live_screen.show_live_line(Console(tty=(False, False)), Output(), environ={})


def test_the_job_that_this_process_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    screen = live_screen.LiveScreen(Console(), None, ())
    assert screen._find_event_log() is None
    now = time.time()
    for run, pid, made in (
        ("old", os.getpid(), now - 60),
        ("mine", os.getpid(), now),
        ("x", 1, now),
    ):
        record = make_job_record(
            run, run, events=f"/logs/{run}/events.jsonl", log_dir="/logs", made=made, pid=pid
        )
        assert register_job(record)
    assert screen._find_event_log() == Path("/logs/mine/events.jsonl")


def test_a_job_in_the_background_leaves_the_line_to_its_shell() -> None:
    code = (
        "import fcntl, os, termios\n"
        "from pdrun.launcher.jobs.views.live_screen import is_in_foreground\n"
        "print(is_in_foreground(0), flush=True)\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "print(is_in_foreground(0), flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    print(is_in_foreground(0), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    master, own = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=own,
            stdout=subprocess.PIPE,
            start_new_session=True,
            timeout=60,
        )
    finally:
        os.close(master)
        os.close(own)
    # a terminal that controls nothing, the shell's foreground, its background
    assert done.stdout.split() == [b"True", b"True", b"False"]
