"""Parameter servers in every way of starting a job: placed before it, and used by its workers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.clusters.conftest import Cluster, Run
from tests.e2e.clusters.test_mpirun import OPENMPI, alone, words
from tests.e2e.clusters.test_slurm import conf
from tests.launcher.ranktables.test_rules import table

TRAIN = """
import os, torch, pdrun
client = pdrun.servers.connect("sync", timeout=150)
# 3 pieces, so that both servers have some
client.add_dense("w", pdrun.servers.dense(lr=1.0), torch.zeros(600_000))
client.add_rows("t", pdrun.rows("sgd", lr=1.0), dim=2, size=1000, scale=0.0)
rank = int(os.environ["RANK"])
for step in range(2):
    client.push("w", torch.full((600_000,), rank + 1.0))
    client.push_rows("t", torch.arange(rank, 1000, 2), torch.ones(500, 2))
    client.clock()
w, t = client.pull("w"), client.rows("t", torch.arange(1000))
kinds = "".join(sorted("u" if link._channel.is_local else "t" for link in client._links))
print("seen", rank, os.uname().nodename, w.unique().tolist(), t.unique().tolist(), kinds)
client.close()
"""
SERVERS = ("--servers", "1/node")
PDRUN = (sys.executable, "-m", "pdrun")


def start_ssh(cluster: Cluster, script: str) -> list[Run]:
    return [cluster.start("pdrun", "--hosts", "h2,h3", "--devices", "1", *SERVERS, script)]


def start_job_file(cluster: Cluster, script: str) -> list[Run]:
    text = f"program: {{script: {script}}}\nplace: {{hosts: 'h2,h3'}}\n"
    text += "resources: {servers: 1/node, devices: 1}\n"
    (cluster.folder / "job.yaml").write_text(text)
    return [cluster.start("pdrun", "run", "job.yaml")]


def start_rank_table(cluster: Cluster, script: str) -> list[Run]:
    data = table(2, 1)
    for server, name in zip(data["server_list"], ("h2", "h3"), strict=True):
        server["server_id"] = name
    (cluster.folder / "hccl.json").write_text(json.dumps(data))
    more = ("--rank-table", "hccl.json", "--backend", "cpu")
    return [cluster.start("pdrun", *more, *SERVERS, script)]


def start_everywhere(cluster: Cluster, script: str) -> list[Run]:
    more = ("--launcher", "none", "--hosts", "h2,h3", "--devices", "1", *SERVERS, script)
    return [cluster.start("pdrun", *more, at=host) for host in ("h2", "h3")]


def start_in_mpirun(cluster: Cluster, script: str) -> list[Run]:
    pdrun = (*PDRUN, "--devices", "1", *SERVERS, script)
    more = {"XDG_CONFIG_HOME": "/root/.config"}
    return [cluster.start(*words(OPENMPI, 2, 1, "h1,h2"), *pdrun, env=more)]


def start_by_mpirun(cluster: Cluster, script: str) -> list[Run]:
    more = ("--launcher", "mpirun", "--mpirun", OPENMPI, "--hosts", "h2,h3", "--devices", "1")
    return [cluster.start("pdrun", *more, *SERVERS, script)]


WAYS = [start_ssh, start_job_file, start_rank_table, start_everywhere]
MPI_WAYS = [start_in_mpirun, start_by_mpirun]


def check_output(runs: list[Run]) -> None:
    """Both workers have used both servers; the hosts share a kernel, so by unix sockets."""
    codes = [job.wait(240) for job in runs]
    out, err = "".join(job.out for job in runs), "".join(job.err for job in runs)
    assert codes == [0] * len(runs), err
    found = sorted(re.findall(r"seen (\d) h(\d) \[-6\.0\] \[-2\.0\] (\w+)", out))
    assert [(rank, kinds) for rank, _, kinds in found] == [("0", "uu"), ("1", "uu")], out + err
    assert int(found[0][1]) + 1 == int(found[1][1])


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
@pytest.mark.parametrize("start", [*WAYS, *MPI_WAYS])
def test_servers_of_two_hosts(cluster: Cluster, start: Callable[[Cluster, str], list[Run]]) -> None:
    if start in MPI_WAYS and shutil.which(OPENMPI) is None:
        pytest.skip(f"needs {OPENMPI}")
    check_output(start(cluster, cluster.script(TRAIN)))


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_servers_under_srun(cluster: Cluster, slurmed) -> None:
    script = cluster.script(TRAIN)
    pdrun = (*PDRUN, "--devices", "1", *SERVERS, script)
    run = ("srun", "-N2", "-w", "h2,h3", "--ntasks-per-node=1", *pdrun)
    check_output([cluster.start(*run, env=conf(slurmed))])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hosts", "job file", "rank table", "mpirun", "local"])
def test_a_dry_run_shows_the_servers(tmp_path: Path, way: str) -> None:
    (tmp_path / "work.py").write_text("")
    data = table(2, 1)
    (tmp_path / "hccl.json").write_text(json.dumps(data))
    text = "program: {script: work.py}\nplace: {hosts: 'h2,h3'}\nresources: {servers: 1/node}\n"
    (tmp_path / "job.yaml").write_text(text)
    found = {
        "hosts": ("--hosts", "h2,h3", *SERVERS, "--dry-run", "work.py"),
        "job file": ("run", "--dry-run", "job.yaml"),
        "rank table": ("--rank-table", "hccl.json", *SERVERS, "--dry-run", "work.py"),
        "mpirun": ("--launcher", "mpirun", "--hosts", "h2,h3", *SERVERS, "--dry-run", "work.py"),
        "local": ("--local", "--nodes", "2", *SERVERS, "--dry-run", "work.py"),
    }[way]
    if way == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun")
    done = alone(tmp_path, *PDRUN, *found)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^servers +2, 1 per node", done.stdout, re.MULTILINE), done.stdout
