"""The questions about this machine, and what real launchers' tasks find with them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdrun.launcher.adapters.probes import make_probes

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENV = [sys.executable, "-P", "-m", "pdrun", "env", "--json"]
CLEAN = ("SLURM_", "OMPI_", "PMI", "MPI_", "HYDR", "PET_", "PDRUN_", "RANK", "WORLD_SIZE")


def clean(**more: str) -> dict[str, str]:
    """Return this environment without any launcher's words, and with more."""
    return {name: value for name, value in os.environ.items() if not name.startswith(CLEAN)} | more


def launcher_of(command: list[str], **more: str) -> list[dict[str, object]]:
    """
    Return what ``pdrun env`` says in each task of a command, the JSON objects standing one behind
    another.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean(**more), timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(done.stdout.rstrip()):
        data, at = decoder.raw_decode(done.stdout, at)
        found.append(data["launcher"])
        while at < len(done.stdout) and done.stdout[at].isspace():
            at += 1
    return found


def skip_unless_installed(program: str) -> str:
    """Return a program's path, or skip."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def test_ancestors_are_this_process_and_its_parents() -> None:
    probes = make_probes()
    assert probes.is_ancestor(os.getpid()) is True
    assert probes.is_ancestor(os.getppid()) is True
    sibling = subprocess.Popen(["sleep", "60"])
    try:
        assert probes.is_ancestor(sibling.pid) in (False, None)
    finally:
        sibling.kill()
        sibling.wait()
    assert probes.is_under(("no-such-command",)) in (False, None)
    assert probes.is_ancestor(1) in (True, None)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    probes = make_probes(root=tmp_path)
    assert probes.is_ancestor(1) is None
    assert probes.is_under(("init",)) is None
    assert probes.option_above(("init",), "--x") == ""
    assert probes.peer_above(("init",), 3) == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_peer_of_a_connection_is_found(address: str) -> None:
    try:
        server = socket.create_server(
            ("::" if address == "::ffff:127.0.0.1" else address, 0),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            dualstack_ipv6=address == "::ffff:127.0.0.1",
        )
    except OSError:
        pytest.skip("no IPv6 here")
    me = (Path("/proc/self/comm").read_text().strip(),)
    with server, socket.socket(server.family) as near:
        near.connect((address, server.getsockname()[1]))
        assert make_probes().peer_above(me, near.fileno()) == address.removeprefix("::ffff:")
        assert make_probes().peer_above(("no-such-command",), near.fileno()) == ""
    assert make_probes().peer_above(me, 10**6) == ""


def test_an_option_of_an_ancestor_is_found() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[3]], check=True)"
    inner = (
        "from pdrun.launcher.adapters.probes import make_probes; import pathlib;"
        "name = pathlib.Path('/proc/self/comm').read_text().strip();"
        "print(make_probes().option_above((name,), '--control-port') or make_probes().is_under((name,)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--control-port", "h1:4000", inner],
        capture_output=True,
        text=True,
        check=True,
    )  # the nearest python is the inner one, which has no such word
    assert done.stdout.strip() in ("True", "h1:4000")


def test_descriptors_ports_and_files(tmp_path: Path) -> None:
    probes = make_probes()
    with (tmp_path / "f").open("w") as file:
        assert probes.is_open(file.fileno())
        number = file.fileno()
    assert not probes.is_open(number)
    assert not probes.is_open(10**18)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probes.accepts_connections("127.0.0.1", port)
    assert not probes.accepts_connections("127.0.0.1", port)
    (tmp_path / "hosts").write_text("n1\n")
    assert probes.read_file(str(tmp_path / "hosts")) == "n1\n"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nope", "."):
        with pytest.raises((OSError, ValueError)):
            probes.read_file(str(tmp_path / name))
    with pytest.raises(ValueError, match="not a regular file"):
        probes.read_file("/dev/zero")


@pytest.mark.slow
def test_open_mpi_variables_are_fresh_in_tasks_and_stale_after_them(tmp_path: Path) -> None:
    mpirun = skip_unless_installed("mpirun.openmpi")
    # A file per task: mpirun mixes what tasks print beyond a few kilobytes.
    to_file = f'"$0" "$@" > {tmp_path}/task-$OMPI_COMM_WORLD_RANK.json'
    command = [mpirun, "--oversubscribe", "-n", "2", "sh", "-c", to_file, *ENV]
    subprocess.run(command, env=clean(**AS_ROOT), timeout=120, check=True)
    found = [
        json.loads(path.read_text())["launcher"] for path in sorted(tmp_path.glob("task-*.json"))
    ]
    assert sorted(
        (one["launcher"], one["rank"], one["world"], one["local_size"]) for one in found
    ) == [("openmpi", 0, 2, 2), ("openmpi", 1, 2, 2)]
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [mpirun, "-n", "1", sys.executable, "-c", dump],
        capture_output=True,
        text=True,
        env=clean(**AS_ROOT),
        timeout=120,
        check=True,
    )
    left = {
        name: value
        for name, value in json.loads(done.stdout).items()
        if name.startswith(("OMPI_", "PMIX_"))
    }
    (stale,) = launcher_of(ENV, **left)
    assert stale["launcher"] == "none"
    notes: Any = stale["notes"]
    assert any("stale variables of" in note for note in notes)


@pytest.mark.slow
def test_tasks_of_mpich_find_the_host_of_mpiexec() -> None:
    mpiexec = skip_unless_installed("mpiexec.hydra")
    (found,) = launcher_of([mpiexec, "-n", "1", *ENV])
    assert (found["launcher"], found["rank"], found["world"], found["node_rank"]) == (
        "mpich",
        0,
        1,
        0,
    )
    assert found["head"] == os.uname().nodename
    # closes PMI_FD on the way
    through = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    (again,) = launcher_of([mpiexec, "-n", "1", sys.executable, "-c", through, *ENV])
    assert again["launcher"] == "mpich"
    (stale,) = launcher_of(ENV, PMI_RANK="0", PMI_SIZE="2", PMI_FD="99", MPI_LOCALRANKID="0")
    assert stale["launcher"] == "none"
