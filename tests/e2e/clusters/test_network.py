"""`--hosts` through a jump host, and between hosts with a firewall."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters.conftest import Cluster
from tests.lib.netns_hosts import run

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.xdist_group("hosts")]

PORTS = "21000-21010"
SHOW_PORT = "import os; print('port', os.environ['MASTER_PORT'], flush=True)\n"


@contextlib.contextmanager
def firewall(cluster: Cluster, *accepted: str) -> Iterator[None]:
    """On h1 and h2: ssh and answers pass, and what is accepted; the rest is refused."""
    rules = "".join(f"tcp dport {ports} accept\n" for ports in ("22", *accepted))
    table = (
        "table inet pdrun_test {\nchain in { type filter hook input priority 0;\n"
        "ct state established,related accept\niif lo accept\nmeta l4proto != tcp accept\n"
        f"{rules}reject with tcp reset\n}}\n}}"
    )
    spaces = [f"{cluster.hosts.tag}-{name}" for name in ("h1", "h2")]
    for space in spaces:
        run("ip", "netns", "exec", space, "nft", table)
    try:
        yield
    finally:
        for space in spaces:
            run("ip", "netns", "exec", space, "nft", "delete table inet pdrun_test", check=False)


def test_a_firewall_that_passes_ssh_only_is_named(cluster: Cluster) -> None:
    with firewall(cluster):
        job = cluster.start("pdrun", "--hosts", "h1,h2", cluster.script(SHOW_PORT))
        job.expect("so a firewall between the hosts blocks the port")
        job.expect("--port-range LOW-HIGH")
        os.kill(cluster.inside(job), signal.SIGINT)
        assert job.wait() == 130


def test_a_port_range_passes_a_firewall(cluster: Cluster) -> None:
    with firewall(cluster, PORTS):
        script = cluster.script(SHOW_PORT)
        code, out, err = cluster.run("pdrun", "--hosts", "h1,h2", "--port-range", PORTS, script)
    assert code == 0, err
    ports = {int(line.rpartition(" ")[2]) for line in out.splitlines()}
    assert len(ports) == 1
    assert ports <= set(range(21000, 21011))


def test_a_jump_host_that_drops_logins(cluster: Cluster) -> None:
    """Its sshd drops every login above one in progress; pdrun repeats them."""
    folder = cluster.folder
    config = (cluster.hosts.folder / "sshd_config").read_text()
    config = config.replace("Port 22\n", "Port 2200\n").replace("200:30:400", "1:100:1")
    (folder / "jump_config").write_text(config)
    start = ["/usr/sbin/sshd", "-D", "-f", str(folder / "jump_config"), "-E", f"{folder}/jump.log"]
    jump = subprocess.Popen([*cluster.hosts.enter("h1"), *start])
    try:
        hosts = cluster.hosts
        ssh = folder / "ssh_config"
        jump_options = f"Port 2200\nHostName {hosts.address('h1')}\nStrictHostKeyChecking no\n"
        jump_options += "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        ssh.write_text(f"Host bastion\n{jump_options}Host h2 h3\nProxyJump bastion\n")
        script = cluster.script("print('here', flush=True)\n")
        code, out, err = cluster.run("pdrun", "--hosts", "h2,h3", "--ssh-opts", f"-F {ssh}", script)
    finally:
        jump.terminate()
        jump.wait(20)
    assert code == 0, err
    assert out.count("here") == 2
    assert "MaxStartups" in Path(f"{folder}/jump.log").read_text()
