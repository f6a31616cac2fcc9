"""
mpirun three ways: it starts the script, it starts pdrun, pdrun starts it; Open MPI and MPICH as
Debian has them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdrun.launcher.config.spec import JobSpec, Program, RemoteOptions
from pdrun.launcher.plan.find_launchers import find_external_launcher
from tests.e2e.clusters.conftest import Cluster
from tests.e2e.clusters.test_ssh import SLEEP, up
from tests.lib.tiers import thorough

OPENMPI, MPICH = "mpirun.openmpi", "mpirun.mpich"
INIT = (
    "import os, sys, pdrun\nctx = pdrun.init(group=False)\nme = (ctx.rank, ctx.world_size,"
    " ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.nodes)\nprint(' '.join(map(str,"
    " ('me', *me, os.uname().nodename, '\\n'))), end='', flush=True)\n"
)
"""One write a rank: they share a pipe."""
QUICK = f"import sys\nsys.modules['torch'] = None\n{INIT}"
"""The same where torch is not installed, which takes longer than all the rest."""
BOTH = pytest.mark.parametrize("program", [OPENMPI, MPICH])
ONE = pytest.mark.parametrize("program", [OPENMPI, thorough(MPICH)])
"""For what is the same whoever starts the tasks; MPICH has a case of each of the three ways."""


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    program = callspec.params.get("program") if callspec else None
    if program and shutil.which(program) is None:
        pytest.skip(f"needs {program} (Debian: openmpi-bin, mpich)")


def words(
    program: str, count: int, each: int = 0, hosts: str = "", names: tuple[str, ...] = ()
) -> list[str]:
    """Return the user's own mpirun command: ``count`` tasks, ``each`` a node."""
    if program == OPENMPI:
        spread = ["--map-by", f"ppr:{each}:node"] if each else []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        listed = ["--host", ",".join(f"{host}:9" for host in hosts.split(","))] if hosts else []
        passed = [word for name in names for word in ("-x", name)]
        return [program, *root, "--oversubscribe", "-np", str(count), *spread, *listed, *passed]
    return [
        program,
        "-n",
        str(count),
        *(["-ppn", str(each)] if each else []),
        *(["-hosts", hosts] if hosts else []),
    ]


def home(folder: Path) -> dict[str, str]:
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PDRUN_", "SLURM_", "OMPI_"))
    }
    return {
        **keep,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def alone(
    folder: Path, *argv: str, timeout: float = 150.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on this machine itself, without namespaces."""
    return subprocess.run(
        argv,
        cwd=folder,
        env={**home(folder), **env},
        text=True,
        capture_output=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


# (a) mpirun -n 4 python train.py
# --------------------------------------------------------------------------------------


@pytest.mark.thorough  # the next ones, and test_mpi_wheels.py, have what it shows
@BOTH
def test_init_finds_the_other_ranks_on_one_host(program: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(QUICK)
    done = alone(tmp_path, *words(program, 4), sys.executable, "work.py")
    assert done.returncode == 0, done.stderr
    found = sorted(re.findall(r"^me (\d) 4 (\d) 4 0 1 ", done.stdout, re.MULTILINE))
    assert found == [(str(rank), str(rank)) for rank in range(4)], done.stdout
    # on a slow machine, the ranks that are waited for are named
    lines = [line for line in done.stderr.splitlines() if "workers are here" not in line]
    assert "pdrun" not in "".join(lines), done.stderr


@BOTH
def test_a_world_of_one_needs_nobody(program: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(QUICK)
    done = alone(tmp_path, *words(program, 1), sys.executable, "work.py")
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["me", "0", "1"]), done.stderr


@ONE
def test_rank_0_may_end_first_and_a_failure_ends_all(program: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        QUICK + "import time\nif ctx.rank: time.sleep(1)\nif sys.argv[1:] and ctx.rank == 2:"
        " sys.exit(7)\n"
        "if sys.argv[1:]: time.sleep(60)\nprint(f'end {ctx.rank}\\n', end='', flush=True)\n"
    )
    done = alone(tmp_path, *words(program, 3), sys.executable, "work.py")
    assert (done.returncode, sorted(re.findall(r"end (\d)", done.stdout))) == (
        0,
        ["0", "1", "2"],
    ), done.stderr
    done = alone(tmp_path, *words(program, 3), sys.executable, "work.py", "die", timeout=150)
    assert done.returncode != 0 and "end" not in done.stdout


@ONE
@pytest.mark.torch
@pytest.mark.slow
def test_init_makes_a_process_group(program: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "work.py").write_text(
        "import pdrun, torch, torch.distributed as dist\nctx = pdrun.init()\nx = torch.ones(1) *"
        " ctx.rank\ndist.all_reduce(x)\nprint(f'sum {x.item()}\\n', end='', flush=True)\n"
    )
    done = alone(tmp_path, *words(program, 2), sys.executable, "work.py")
    assert (done.returncode, re.findall(r"sum (\S+)", done.stdout)) == (0, ["1.0"] * 2), done.stderr


@BOTH
@pytest.mark.root
@pytest.mark.slow
def test_init_finds_the_ranks_on_other_hosts(program: str, cluster: Cluster) -> None:
    script = cluster.script(QUICK)
    more = {
        "XDG_CONFIG_HOME": "/root/.config"
    }  # the one that ssh's session has, too: Open MPI passes no variables
    argv = [*words(program, 6, 2, "h1,h2,h3"), sys.executable, script]
    code, out, err = cluster.run(*argv, env=more)
    assert code == 0, err
    found = sorted(re.findall(r"^me (\d) 6 (\d) 2 \d \d (h\d)", out, re.MULTILINE))
    assert found == [(str(rank), str(rank % 2), f"h{rank // 2 + 1}") for rank in range(6)], out


@pytest.mark.root
@pytest.mark.slow
def test_where_rank_0_is_elsewhere_the_error_says_what_to_pass(cluster: Cluster) -> None:
    if shutil.which(OPENMPI) is None:
        pytest.skip("needs Open MPI (Debian: openmpi-bin)")
    script = cluster.script(QUICK)
    code, _, err = cluster.run(
        *words(OPENMPI, 2, 1, "h2,h3"),
        sys.executable,
        script,
        env={"XDG_CONFIG_HOME": "/root/.config"},
    )
    assert code != 0
    assert re.search(
        r"rank 0 runs on h2, but the other ranks connect to \S+; set PDRUN_SCHEDULER=h2:\d+ for all"
        r" ranks",
        err,
    )
    code, out, err = cluster.run(
        *words(OPENMPI, 2, 1, "h2,h3", ("PDRUN_SCHEDULER",)),
        sys.executable,
        script,
        env={"XDG_CONFIG_HOME": "/root/.config", "PDRUN_SCHEDULER": "h2:23456"},
    )
    assert (code, len(re.findall("^me", out, re.MULTILINE))) == (0, 2), err


# (b) mpirun --map-by ppr:1:node pdrun train.py
# ------------------------------------------------------------------------


@BOTH
@pytest.mark.root
@pytest.mark.slow
def test_each_task_of_mpirun_is_an_agent(program: str, cluster: Cluster) -> None:
    script = cluster.script(
        "import os\nprint('me', os.environ['RANK'], os.environ['WORLD_SIZE'],"
        " os.uname().nodename)\n"
    )
    pdrun = [sys.executable, "-m", "pdrun", "--devices", "2", script]
    more = {"XDG_CONFIG_HOME": "/root/.config"}
    code, out, err = cluster.run(*words(program, 3, 1, "h1,h2,h3"), *pdrun, env=more)
    assert code == 0, err
    found = sorted(re.findall(r"me (\d) 6 (h\d)", out))
    assert found == [(str(rank), f"h{rank // 2 + 1}") for rank in range(6)], out
    assert err.count("6 workers on 3 nodes") == 1 and "pdrun join" not in err


@ONE
@pytest.mark.root
@pytest.mark.slow
def test_the_secret_may_come_by_name(program: str, cluster: Cluster) -> None:
    """Homes that are not shared: each host has a cookie of its own, and the token goes along."""
    token = cluster.run("pdrun", "token", "create")[1].strip()
    script = cluster.script(
        "import os\nprint('me', os.environ['RANK'], os.environ.get('PDRUN_TOKEN'))\n"
    )
    wrap = cluster.script('#!/bin/sh\nexport XDG_CONFIG_HOME=/run/$(hostname)\nexec "$@"\n', "wrap")
    (cluster.folder / wrap).chmod(0o755)
    argv = [str(cluster.folder / wrap), sys.executable, "-m", "pdrun", "--devices", "1", script]
    code, out, err = cluster.run(
        *words(program, 2, 1, "h1,h2", ("PDRUN_TOKEN",)), *argv, env={"PDRUN_TOKEN": token}
    )
    assert code == 0, err
    assert sorted(re.findall(r"me (\d) None", out)) == ["0", "1"]
    assert token not in out + err
    argv = [*argv[:-1], "--start-timeout", "10", script]
    code, _, err = cluster.run(*words(program, 2, 1, "h1,h2"), *argv)
    assert code != 0 and "the token differs" in err


def test_several_tasks_on_a_node_are_refused(tmp_path: Path) -> None:
    if shutil.which(OPENMPI) is None:
        pytest.skip("needs Open MPI (Debian: openmpi-bin)")
    (tmp_path / "work.py").write_text("open('ran', 'w')\n")
    done = alone(tmp_path, *words(OPENMPI, 2), sys.executable, "-m", "pdrun", "work.py")
    assert done.returncode != 0 and not (tmp_path / "ran").exists()
    assert "started 2 tasks on this node" in done.stderr and "--map-by ppr:1:node" in done.stderr


# (c) pdrun --launcher mpirun
# ------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.root
@pytest.mark.slow
def test_pdrun_starts_mpirun_and_everything_arrives(program: str, cluster: Cluster) -> None:
    script = cluster.script(
        "import json, os, sys\n"
        "json.dump([sys.argv[1:], os.environ.get('FUZZ'), os.uname().nodename, sorted(os.environ)],"
        " open(os.environ['RANK'] + '.json', 'w'))\n"
    )
    (cluster.folder / "hosts").write_text("h1\nh2 slots=2\nh3\n")
    nasty = ["a b", "", "$(touch ran)", "'\"\n", "é", "{}"]
    code, _, err = cluster.run(
        "pdrun",
        "--launcher",
        "mpirun",
        "--mpirun",
        program,
        "--hostfile",
        "hosts",
        "--forward",
        "FUZZ",
        script,
        *nasty,
        env={"FUZZ": "x\n$y"},
    )
    assert code == 0, err
    import json

    found = [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(4)]
    assert [row[:3] for row in found] == [
        [nasty, "x\n$y", host] for host in ("h1", "h2", "h2", "h3")
    ]
    left = {name for row in found for name in row[3]}
    assert not left & {
        "PDRUN_ORDER",
        "PDRUN_TOKEN",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "PMI_FD",
        "PMIX_RANK",
    }
    assert not (cluster.folder / "ran").exists()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "death", "code"),
    [
        (OPENMPI, "sys.exit(42)", 42),
        thorough(MPICH, "sys.exit(42)", 42),
        thorough(OPENMPI, "os.kill(os.getpid(), 11)", 139),
        (MPICH, "os.kill(os.getpid(), 9)", 137),
        thorough(MPICH, "os.kill(os.getpid(), 11)", 139),
        thorough(OPENMPI, "os.kill(os.getpid(), 9)", 137),
    ],
)
def test_codes_are_the_workers_not_mpiruns(
    program: str, death: str, code: int, cluster: Cluster
) -> None:
    script = cluster.script(
        "import os, sys, time\nif os.environ['RANK'] == '1': time.sleep(0.2);"
        f" {death}\ntime.sleep(60)\n"
    )
    found, _, err = cluster.run("pdrun", "--mpirun", program, "--hosts", "h1,h2", script)
    assert found == code, err
    assert "rank 1 on h2" in err and "mpirun has exited" not in err and "aborted" not in err
    cluster.nothing_left()


@ONE
@pytest.mark.root
@pytest.mark.slow
def test_a_stop_and_a_killed_front_leave_nothing(program: str, cluster: Cluster) -> None:
    script = cluster.script(SLEEP)
    job = cluster.start("pdrun", "--mpirun", program, "--hosts", "h1,h2", script)
    up(cluster, 2)
    os.kill(cluster.inside(job), signal.SIGTERM)
    assert job.wait(40) == 143, job.err
    cluster.nothing_left()
    for name in ("0.up", "1.up"):
        (cluster.folder / name).unlink()
    job = cluster.start("pdrun", "--mpirun", program, "--hosts", "h1,h2", "--grace", "1", script)
    up(cluster, 2)
    os.kill(cluster.inside(job), signal.SIGKILL)
    job.wait()
    cluster.nothing_left(40.0)


@ONE
@pytest.mark.root
@pytest.mark.slow
def test_a_killed_agent_and_a_killed_mpirun_end_the_job(program: str, cluster: Cluster) -> None:
    script = cluster.script(SLEEP)
    for victim, host in (("task_main", "h2"), (program, "h1")):
        for name in ("0.up", "1.up"):
            (cluster.folder / name).unlink(missing_ok=True)
        job = cluster.start(
            "pdrun", "--mpirun", program, "--hosts", "h1,h2", "--grace", "1", script
        )
        up(cluster, 2)
        rows = [
            pid
            for pid, command in cluster.hosts.processes(host)
            if victim in command.split(" -m pdrun ")[0]
            or (victim == "task_main" and "task_main" in command and "mpirun" not in command)
        ]
        os.kill(min(rows) if victim == program else max(rows), signal.SIGKILL)
        assert job.wait(60) not in (0, None), job.err
        assert "Traceback" not in job.err
        cluster.nothing_left(30.0)


@pytest.mark.parametrize("program", [thorough(OPENMPI), MPICH])
@pytest.mark.root
@pytest.mark.slow
def test_without_a_token_when_that_is_spelled_out(program: str, cluster: Cluster) -> None:
    script = cluster.script("import os\nprint('me', os.environ['RANK'])\n")
    code, out, err = cluster.run(
        "pdrun", "--insecure", "--mpirun", program, "--hosts", "h1,h2", script
    )
    assert code == 0, err
    assert sorted(re.findall(r"me (\d)", out)) == ["0", "1"]


@pytest.mark.root
@pytest.mark.slow
def test_an_mpirun_that_reaches_nobody(cluster: Cluster) -> None:
    if shutil.which(OPENMPI) is None:
        pytest.skip("needs Open MPI (Debian: openmpi-bin)")
    script = cluster.script("open('ran', 'w')\n")
    code, _, err = cluster.run("pdrun", "--mpirun", OPENMPI, "--hosts", "h1,nowhere", script)
    assert code == 78 and "--hosts: the name 'nowhere' is not known here" in err, err
    code, _, err = cluster.run(
        "pdrun", "--mpirun", OPENMPI, "--hosts", f"h1,{cluster.hosts.net}.77", script
    )
    assert code != 0
    assert re.search(r"pdrun: mpirun ended with code \d+ before the job was over", err)
    assert not (cluster.folder / "ran").exists()


@ONE
def test_mpirun_inside_a_worker_still_works(program: str, tmp_path: Path) -> None:
    inner = " ".join(words(program, 2))
    (tmp_path / "work.py").write_text(
        f"import subprocess, sys\ndone = subprocess.run({inner.split()!r} + ['sh', '-c', 'echo"
        " inner $OMPI_COMM_WORLD_SIZE$PMI_SIZE'],\n                      capture_output=True,"
        " text=True)\nprint(done.stdout, done.stderr)\nsys.exit(done.returncode)\n"
    )
    outer = [*words(program, 1), sys.executable, "-m", "pdrun", "--nodes", "1", "work.py"]
    done = alone(tmp_path, *outer)
    assert (done.returncode, done.stdout.count("inner 2")) == (0, 2), done.stdout + done.stderr


def test_a_program_that_is_no_mpirun_is_refused(tmp_path: Path) -> None:
    for program, text in (
        ("/bin/true", "is not a known mpirun"),
        ("/no/such/mpirun", "/no/such/mpirun was not found"),
    ):
        done = alone(
            tmp_path, sys.executable, "-m", "pdrun", "--mpirun", program, "--nodes", "2", "work.py"
        )
        assert done.returncode == 78 and text in done.stderr, done.stderr
    spec = JobSpec(Program("script", "x.py"), reach=RemoteOptions(mpirun=""))
    assert find_external_launcher("mpirun", spec, {"PATH": "/nowhere"}).error.startswith(
        "mpirun or mpiexec or jsrun was not found"
    )
