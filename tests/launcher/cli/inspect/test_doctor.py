"""``pdrun doctor`` as a command: findings, exit codes, and the job that checks nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.launcher.cli.inspect import doctor
from pdrun.launcher.doctor import runner
from pdrun.launcher.doctor.finding import Finding
from tests.launcher.cli.conftest import Outcome

Pdrun = Callable[..., Outcome]


def test_findings_of_this_machine(pdrun: Pdrun) -> None:
    done = pdrun("doctor", "--only", "versions,quota")
    assert done.code in (0, 78)
    assert "python 3." in done.out and "finding" in done.out.splitlines()[-1]
    found = json.loads(pdrun("doctor", "--json", "--only", "versions").out)["findings"]
    assert {one["check"] for one in found} == {"versions"}


def test_what_cannot_be_checked(pdrun: Pdrun) -> None:
    done = pdrun("doctor", "--only", "disks")
    assert done.code == 2 and "no such check 'disks'" in done.err
    assert pdrun("doctor", "--devices", "2").code == 2


@pytest.mark.parametrize(
    ("level", "options", "code"),
    [("ok", [], 0), ("warn", [], 0), ("warn", ["--strict"], 1), ("fail", [], 78)],
)
def test_exit_codes(
    level: str, options: list[str], code: int, pdrun: Pdrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Finding("disk", level, "what \x1b[2J is", "/where", "do that", "host")
    monkeypatch.setattr(runner, "run_checks", lambda *args: [one])
    done = pdrun("doctor", *options)
    assert done.code == code
    assert done.out.startswith(f"{level:<5} disk       host: /where: what \\x1b[2J is\n")
    assert ("-> do that" in done.out) == (level != "ok")


def test_nodes_that_cannot_start_are_a_finding(pdrun: Pdrun, folder: Path) -> None:
    done = pdrun("doctor", "--hosts", "no-such-host.invalid", "--json")
    (found,) = json.loads(done.out)["findings"]
    assert done.code == 78
    assert found["check"] == "job" and "no-such-host.invalid" in found["what"] + found["hint"]


@pytest.mark.torch
def test_two_nodes(folder: Path) -> None:
    (folder / "conf.yaml").write_text("lr: 1")
    command = [sys.executable, "-m", "pdrun", "doctor", "--nodes", "2", "--local", "--json"]
    done = subprocess.run(
        [*command, "--files", "conf.yaml,none.yaml"], capture_output=True, text=True, timeout=120
    )
    found = json.loads(done.stdout)["findings"]
    by_check = {one["check"]: one for one in found}
    assert by_check["ports"]["level"] == "ok", found
    assert "1 pair" in by_check["ports"]["what"]
    assert "MB/s" in by_check["allreduce"]["what"] and "MB/s" in by_check["bandwidth"]["what"]
    assert by_check["differs"]["level"] == "ok" and by_check["shm"]["node"]
    assert not any("variables of a worker" in one["what"] for one in found)


@pytest.mark.parametrize(
    ("devices", "accelerator", "passed"), [(None, False, "2"), (None, True, None), (4, False, "4")]
)
def test_a_calibration_has_links_to_measure(
    devices: int | None,
    accelerator: bool,
    passed: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(doctor, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor.run_calibration(devices, "", "mine") == 0
    (command,) = commands
    given = command[command.index("--devices") + 1] if "--devices" in command else None
    assert given == passed
