"""Slurm that tracks and confines its jobs by cgroups, and heterogeneous jobs, for real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters.conftest import Cluster, kill_all, until
from tests.e2e.clusters.test_slurm import COUNT, SHOW, conf, output, submit
from tests.lib import netns_hosts
from tests.lib import slurm_cluster as slurm
from tests.lib.slurm_cluster import Slurm

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.thorough]

STRAY = (
    "import json, os, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "group = open('/proc/self/cgroup').read()\n"
    "json.dump([group, len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']],\n"
    "          open(os.environ['RANK'] + '.json', 'w'))\n"
    "time.sleep(600)\n"
)


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm with cgroups on h1, h2 and h3."""
    if why := netns_hosts.missing() or slurm.missing() or slurm.missing_cgroups():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("cgroups")
    for path in (folder, *folder.parents):
        if path != Path("/tmp") and path.is_relative_to("/tmp"):
            path.chmod(path.stat().st_mode | 0o011)
    name = f"pdtest{os.getpid()}"
    mounts = (*slurm.CGROUPS, *slurm.own_cgroup_mounts(name))
    try:
        with netns_hosts.hosts(folder, 3, mounts) as made:
            daemons = folder / "slurm"
            daemons.mkdir(mode=0o711)
            found = Slurm(made, daemons, uses_cgroups=True)
            found.up()
            yield found
    finally:
        slurm.remove_cgroups(name)


@pytest.fixture
def nodes(confined: Slurm, tmp_path: Path) -> Iterator[Cluster]:
    """The hosts of that Slurm, with a folder of the test's own."""
    made = Cluster(confined.hosts, tmp_path)
    yield made
    try:
        made.nothing_left()
    finally:
        kill_all(confined.hosts)


@pytest.mark.parametrize("how", ["tasks of srun", "body"])
def test_a_signal_reaches_a_worker_once(how: str, nodes: Cluster, confined: Slurm) -> None:
    script = nodes.script(COUNT)
    body = f"srun --ntasks-per-node=1 {sys.executable} -m pdrun {script}"
    job = submit(nodes, confined, script, body=body if how != "body" else "")
    until(lambda: len(list(nodes.folder.glob("*.up"))) == 3, "all workers run", 60)
    files = [nodes.folder / f"{rank}.seen" for rank in range(3)]
    for name, seen in (("USR1", "10 "), ("TERM", "10 15 ")):
        code, _, err = nodes.run("scancel", f"--signal={name}", job, env=conf(confined))
        assert code == 0, err
        until(
            lambda seen=seen: all(
                path.exists() and len(path.read_text()) >= len(seen) for path in files
            ),
            f"every worker has SIG{name}",
        )
    nodes.script("", "stop")
    confined.wait_state(job, "COMPLETED", "FAILED", "CANCELLED")
    assert [path.read_text() for path in files] == ["10 15 "] * 3


def test_workers_are_in_the_steps_group_and_all_of_them_end(
    nodes: Cluster, confined: Slurm
) -> None:
    """A worker's threads follow the CPUs that Slurm leaves to the step; scancel leaves no child."""
    script = nodes.script(STRAY)
    body = f"srun --ntasks-per-node=1 --cpus-per-task=1 {sys.executable} -m pdrun {script}"
    job = submit(nodes, confined, body=body)
    until(lambda: len(list(nodes.folder.glob("*.json"))) == 3, "all workers run", 60)
    until(lambda: all(path.read_text() for path in nodes.folder.glob("*.json")), "written")
    for rank in range(3):
        group, cpus, threads = json.loads((nodes.folder / f"{rank}.json").read_text())
        assert f"/uid_0/job_{job}/step_0" in group
        assert (cpus, threads) == (1, "1")
    assert nodes.run("scancel", job, env=conf(confined))[0] == 0
    confined.wait_state(job, "CANCELLED", "COMPLETED", "FAILED")
    until(
        lambda: (
            not any(
                "sleep 600" in command
                for host in nodes.hosts.names
                for _, command in nodes.hosts.processes(host)
            )
        ),
        "no child of a worker is left",
    )


@pytest.mark.parametrize("how", ["tasks of srun", "body"])
def test_a_heterogeneous_job_has_the_nodes_of_all_groups(
    how: str, nodes: Cluster, confined: Slurm
) -> None:
    """Also where the groups have other counts of tasks: there is one agent per node."""
    script = nodes.script(SHOW)
    pdrun = f"{sys.executable} -m pdrun --devices 2 {script}"
    line = pdrun
    if how != "body":
        one = "--nodes=1 --ntasks=1 --ntasks-per-node=1"
        two = "--nodes=2 --ntasks=2 --ntasks-per-node=1"
        line = f"srun --het-group=0 {one} {pdrun} : --het-group=1 {two} {pdrun}"
    text = f"#!/bin/bash\n#SBATCH -N1 --ntasks-per-node=2\n#SBATCH hetjob\n#SBATCH -N2\n{line}\n"
    (nodes.folder / "job.sh").write_text(text)
    words = ("sbatch", "--parsable", "-o", str(nodes.folder / "job.out"), "job.sh")
    code, out, err = nodes.run(*words, env=conf(confined))
    assert code == 0, err
    state = confined.wait_state(out.strip(), "COMPLETED", "FAILED")
    assert state == "COMPLETED", output(nodes)
    found = [json.loads((nodes.folder / f"{rank}.json").read_text()) for rank in range(6)]
    assert [row[1] for row in found] == ["h1", "h1", "h2", "h2", "h3", "h3"]
    assert all(row[2] == "6" for row in found)
    assert "srun: " not in output(nodes) and "warning" not in output(nodes)
