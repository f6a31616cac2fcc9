"""Checks of one machine, on file trees and tools that stand for sick ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from pdrun.backends.base import ProbeEnvironment, ToolAnswer
from pdrun.launcher.cli.inspect.doctor import diagnose
from pdrun.launcher.doctor import (
    device_checks,
    job_checks,
    runner,
    system_checks,
    variable_checks,
)
from pdrun.launcher.doctor.finding import Finding

HEALTHY = "0, 0, No, No, 0x0000000000000000, 41\n"


def machine(
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    tools: Mapping[str, ToolAnswer] | None = None,
) -> ProbeEnvironment:
    def run(command: Sequence[str]) -> ToolAnswer:
        for part, answer in (tools or {}).items():
            if part in " ".join(command):
                return answer
        return ToolAnswer("missing")

    return ProbeEnvironment(root, environ or {}, run, "linux", "x86_64")


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    """A machine with a GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    driver = tmp_path / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module 580.159.04")
    return tmp_path


def serious(found: Iterator[Finding]) -> list[Finding]:
    findings = [one for one in found if one.level != "ok"]
    assert all(one.hint and one.what for one in findings), "each says what to do"
    return findings


def torch_build(folder: Path, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "version.py"
    file.write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    monkeypatch.setattr(device_checks, "find_version_file", lambda: file)


@pytest.mark.parametrize(
    ("cuda", "driver", "level", "text"),
    [
        ("'13.0'", "12.4", "fail", "the driver supports CUDA 12.4, torch 2.13.0 needs 13.0"),
        ("'13.0'", "13.2", "ok", "the driver supports CUDA 13.2, torch is built for 13.0"),
        ("'12.8'", "12.4", "ok", "the driver supports CUDA 12.4"),
        ("None", "13.0", "warn", "a build without CUDA, but NVIDIA GPUs are here"),
    ],
)
def test_the_driver_against_torch(
    cuda: str, driver: str, level: str, text: str, cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_build(cards, cuda, monkeypatch)
    answer = ToolAnswer("ok", f"| NVIDIA-SMI 550  Driver Version: 550  CUDA Version: {driver} |")
    found = list(device_checks.check_driver(machine(cards, tools={"nvidia-smi": answer})))
    assert [(one.level, text in one.what) for one in found] == [(level, True)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ToolAnswer("hung"), "nvidia-smi did not answer in 3 s"),
        (ToolAnswer("failed", "Driver/library version mismatch"), "version mismatch"),
        (ToolAnswer("missing"), "nvidia-smi is not on PATH"),
    ],
)
def test_a_sick_tool_is_a_finding(
    answer: ToolAnswer, text: str, cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_build(cards, "'13.0'", monkeypatch)
    here = machine(cards, tools={"nvidia-smi": answer})
    assert text in serious(device_checks.check_driver(here))[0].what
    assert text in serious(device_checks.check_devices(here))[0].what


@pytest.mark.parametrize(
    ("row", "level", "text"),
    [
        (HEALTHY, "ok", "no memory errors, full clock, 41 C"),
        ("0, 3, No, No, 0x0, 41\n", "warn", "3 uncorrected memory errors"),
        ("0, 0, Yes, No, 0x0, 41\n", "warn", "memory rows wait for a reset"),
        ("0, 0, No, Yes, 0x0, 41\n", "fail", "remapping of memory rows has failed"),
        ("0, 0, No, No, 0x0000000000000048, 93\n", "warn", "hardware thermal slowdown, 93 C"),
        ("0, [N/A], [N/A], [N/A], [N/A], 41\n", "ok", "no memory errors"),
    ],
)
def test_states_of_a_card(row: str, level: str, text: str, cards: Path) -> None:
    tools = {"--query-gpu": ToolAnswer("ok", row), "--query-compute": ToolAnswer("ok", "")}
    (found,) = device_checks.check_devices(machine(cards, tools=tools))
    assert (found.level, found.where) == (level, "GPU 0")
    assert text in found.what


def test_processes_that_still_use_a_device(cards: Path) -> None:
    process = cards / "proc/4711"
    process.mkdir()
    (process / "stat").write_text("4711 (python train) S 1 4711")
    tools = {
        "--query-gpu": ToolAnswer("ok", HEALTHY),
        "--query-compute": ToolAnswer("ok", "4711, GPU-05, 70123, /usr/bin/python\n"),
    }
    (found,) = serious(device_checks.check_devices(machine(cards, tools=tools)))
    assert "process 4711" in found.what and "70123 MiB; its parent has ended" in found.what
    assert found.hint.endswith("kill 4711")


def test_other_vendors_tools_may_hang(tmp_path: Path) -> None:
    found = serious(
        device_checks.check_devices(machine(tmp_path, tools={"npu-smi": ToolAnswer("hung")}))
    )
    assert [one.level for one in found] == ["fail"] and "npu-smi" in found[0].what


def test_devices_that_a_variable_names_wrongly(cards: Path) -> None:
    here = machine(cards, {"CUDA_VISIBLE_DEVICES": "0,0"})
    (found,) = serious(device_checks.check_visibility(here))
    assert found.level == "fail" and "CUDA_VISIBLE_DEVICES" in found.what


@pytest.mark.parametrize(
    ("environ", "level", "text"),
    [
        ({"NCCL_SOCKET_IFNAME": "nope0"}, "fail", "names interface 'nope0'"),
        ({"GLOO_SOCKET_IFNAME": "l"}, "fail", "names interface 'l'"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "", ""),
        ({"NCCL_SOCKET_IFNAME": "l"}, "", ""),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "warn", "variables of a worker are set"),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_JOB_ID": "7"}, "", ""),
        (
            {"MASTER_ADDR": "localhost", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            "fail",
            "is this host for every node",
        ),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", "every kernel is waited for"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "", ""),
        (
            {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"},
            "fail",
            "contradicts TORCH_NCCL_BLOCKING_WAIT=0",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, "warn", "contradicts"),
        ({"OMP_NUM_THREADS": "0"}, "fail", "must be a positive number"),
        ({"OMP_NUM_THREADS": "99999"}, "warn", "is more than the"),
        ({"OMP_NUM_THREADS": "1,1"}, "", ""),
        (
            {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "0"},
            "fail",
            "gives the container none",
        ),
        ({"LD_PRELOAD": "/no/such.so"}, "warn", "which does not exist"),
        ({"TMPDIR": "/tmp"}, "", ""),
    ],
)
def test_variables(environ: dict[str, str], level: str, text: str) -> None:
    found = serious(variable_checks.check_variables(machine(environ=environ)))
    assert [one.level for one in found] == ([level] if level else [])
    assert not found or text in found[0].what


def test_a_library_that_hides_torchs_own(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    here = machine(environ={"LD_LIBRARY_PATH": f"/none:{tmp_path}:"})
    (found,) = serious(variable_checks.check_variables(here))
    assert "libnccl.so.2" in found.what and str(tmp_path) in found.where


def test_rdma_needs_locked_memory_and_is_not_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    limits = {system_checks.resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(
        system_checks.resource, "getrlimit", lambda kind: limits.get(kind, (20000, 20000))
    )
    (found,) = serious(system_checks.check_limits(machine(tmp_path)))
    assert "64 KiB may be locked" in found.what and "mlx5_0" in found.where
    here = machine(tmp_path, {"NCCL_IB_DISABLE": "1"})
    assert "NCCL uses TCP" in serious(variable_checks.check_variables(here))[0].what


@pytest.mark.parametrize(
    ("check", "environ"),
    [
        (system_checks.check_shared_memory, {}),
        (system_checks.check_temporary_folder, {"TMPDIR": "/no/such/folder"}),
    ],
)
def test_folders_that_are_missing(
    check: Callable[[ProbeEnvironment], Iterator[Finding]], environ: dict[str, str], tmp_path: Path
) -> None:
    assert serious(check(machine(tmp_path, environ)))[0].level == "fail"


class FullDisk:
    f_frsize, f_blocks, f_files = 4096, 1 << 20, 1000
    f_bavail, f_favail = 100, 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_checks.os, "statvfs", lambda path: FullDisk)
    here = machine(environ={"PDRUN_LOG_DIR": str(tmp_path / "new/logs")})
    found = serious(system_checks.check_disk(here))
    assert {one.level for one in found} == {"fail"} and len(found) == 2
    assert all(one.where == str(tmp_path) for one in found)
    assert not list(tmp_path.iterdir())


def test_the_folder_of_logs_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_checks.os, "statvfs", lambda path: FullDisk)
    options = {"json": False, "only": "disk", "strict": False, "files": "", "here": False}
    assert diagnose((), log_dir=str(tmp_path), **options) == 78
    out = capsys.readouterr().out
    assert str(tmp_path) in out and "pdrun-logs" not in out


def test_a_clock_that_is_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_checks, "_read_clock_status", lambda: 0x40)
    assert serious(system_checks.check_clock(machine()))[0].what == "the clock is not synchronized"
    monkeypatch.setattr(system_checks, "_read_clock_status", lambda: 0x2001)
    assert not serious(system_checks.check_clock(machine()))


def test_memory_close_to_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(str(1 << 30))
    (folder / "memory.current").write_text(str((1 << 30) - 1000))
    found = serious(system_checks.check_quota(machine(tmp_path)))
    assert [one.where for one in found] == ["memory of the cgroup"]


def test_workers_without_an_agent(tmp_path: Path) -> None:
    agent = "/tmp/pdrun-agent-0-none/agent"
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, "left-over"],
        env={"PDRUN_AGENT": agent},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        found = serious(job_checks.check_jobs(machine()))
        assert any(f"process {process.pid} (" in one.what for one in found), found
        assert process.stdin is not None
        process.stdin.close()


def test_checks_that_hang_or_fail_do_not_hide_the_others(tmp_path: Path) -> None:
    never = threading.Event()

    def hang(here: ProbeEnvironment) -> Iterator[Finding]:
        never.wait(60)
        yield Finding("disk", "ok", "late")

    def fail(here: ProbeEnvironment) -> Iterator[Finding]:
        raise OSError("gone")

    def work(here: ProbeEnvironment) -> Iterator[Finding]:
        yield Finding("shm", "ok", "fine")

    checks = {"disk": hang, "clock": fail, "shm": work}
    found = runner.run_checks(machine(), limit=0.5, checks=checks)
    never.set()
    assert [(one.check, one.level) for one in found] == [
        ("disk", "fail"),
        ("clock", "warn"),
        ("shm", "ok"),
    ]
    assert "did not end in 0.5 s" in found[0].what and "gone" in found[1].what


def test_the_whole_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = runner.run_checks(runner.make_environment(dict(os.environ)))
    assert not [one for one in found if "the check failed" in one.what]
    assert {one.check for one in found} >= {"versions", "disk", "shm", "limits", "quota"}
