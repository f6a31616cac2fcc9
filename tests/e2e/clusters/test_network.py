"""`--hosts` through a jump host, and between hosts with a firewall."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.clusters.conftest import Cluster
from tests.lib.tiers import thorough

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.xdist_group("hosts")]

PORTS = "21000-21010"
SHOW_PORT = "import os; print('port', os.environ['MASTER_PORT'], flush=True)\n"
WAIT = "import time; print('here', flush=True); time.sleep(1000)\n"


@pytest.mark.parametrize("verdict", ["drop", thorough("reject with tcp reset"), thorough("reject")])
def test_a_firewall_that_passes_ssh_only_is_named(cluster: Cluster, verdict: str) -> None:
    with cluster.firewall(verdict=verdict):
        job = cluster.start("pdrun", "--hosts", "h1,h2", cluster.script(SHOW_PORT))
        job.expect("so a firewall between the hosts blocks the port")
        job.expect("--port-range LOW-HIGH")
        os.kill(cluster.inside(job), signal.SIGINT)
        assert job.wait() == 130


@pytest.mark.parametrize("verdict", [thorough("drop"), "reject with tcp reset"])
def test_behind_a_firewall_the_wait_ends_with_the_start_timeout(
    cluster: Cluster, verdict: str
) -> None:
    with cluster.firewall(verdict=verdict):
        job = cluster.start(
            "pdrun", "--hosts", "h1,h2", "--start-timeout", "8s", cluster.script(SHOW_PORT)
        )
        assert job.wait() == 69
        assert (
            "missing: h2" in job.err and "h2 did not join" in job.err and "Traceback" not in job.err
        )
        seen = "it does not answer" if verdict == "drop" else "connections are refused"
        assert f"no scheduler there within 8 s: {seen}" in job.err
        assert "no process listens" not in job.err
        assert "a firewall between the hosts blocks the port" in job.err
        cluster.nothing_left()


def test_a_port_range_passes_a_firewall(cluster: Cluster) -> None:
    with cluster.firewall(PORTS):
        script = cluster.script(SHOW_PORT)
        code, out, err = cluster.run("pdrun", "--hosts", "h1,h2", "--port-range", PORTS, script)
    assert code == 0, err
    ports = {int(line.rpartition(" ")[2]) for line in out.splitlines()}
    assert len(ports) == 1
    assert ports <= set(range(21000, 21011))


def test_a_firewall_raised_while_the_job_runs_changes_nothing(cluster: Cluster) -> None:
    """Answers pass it, and so do connections that are open."""
    job = cluster.start("pdrun", "--hosts", "h1,h2", cluster.script(WAIT))
    job.expect("h2:1| here")
    with cluster.firewall(verdict="drop"):
        os.kill(cluster.inside(job), signal.SIGINT)
        assert job.wait() == 130
        cluster.nothing_left()


def test_a_jump_host_that_drops_logins(cluster: Cluster) -> None:
    """Its sshd drops every login above one in progress; pdrun repeats them."""
    with cluster.jump_host("h2", "h3", limits="1:100:1") as jump:
        script = cluster.script("print('here', flush=True)\n")
        options = ("--ssh-opts", f"-F {jump.config}")
        code, out, err = cluster.run("pdrun", "--hosts", "h2,h3", *options, script)
        assert code == 0, err
        assert out.count("here") == 2
        assert "MaxStartups" in jump.log.read_text()


def test_a_jump_host_that_ends_ends_the_job_everywhere(cluster: Cluster) -> None:
    with cluster.jump_host("h2", "h3") as jump:
        options = ("--ssh-opts", f"-F {jump.config}")
        job = cluster.start("pdrun", "--hosts", "h2,h3", *options, cluster.script(WAIT))
        job.expect("h3:1| here")
        job.expect("h2:0| here")
        cluster.end_jump_host(jump)
        assert job.wait(60) == 69
        cluster.nothing_left()
        assert "h2" in job.err and "h3" in job.err and "Traceback" not in job.err


def test_a_jump_host_that_refuses_is_named_and_nothing_starts(cluster: Cluster) -> None:
    with cluster.jump_host("h3") as jump:
        cluster.end_jump_host(jump)
        options = ("--ssh-opts", f"-F {jump.config}")
        code, out, err = cluster.run("pdrun", "--hosts", "h1,h3", *options, cluster.script(WAIT))
    assert (code, out) == (69, ""), err
    assert "h3: its jump host, bastion: its ssh port is closed (ssh: connect to host" in err
    assert "Connection refused" in err
    cluster.nothing_left()
