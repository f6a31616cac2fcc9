"""
N little hosts on one machine: each has its own network, processes, host name, /run, /dev/shm and
/etc/hosts.

    cluster = Cluster.up("demo", 3)            h1 h2 h3 at 10.77.0.1 to .3 and fd77::1 to ::3
    cluster["h2"].run("hostname")
    cluster["h2"].crash()                      peers get a reset, as from a kernel that goes on
    cluster["h3"].power_off()                  peers get nothing, ever
    cluster.down()

A host is a PID namespace whose first process ("init") holds the others; the switch is a process
whose network namespace holds a bridge with no way out, so no packet can leave the machine. Nothing
has a name outside the folder of the cluster: any number of them exist side by side with the same
addresses. Killing an init ends every process of its host, so `down` always succeeds; a guardian
calls it should the owner die (see `guardian.py`). Needs root, Linux, iproute2, nftables and
util-linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.host import NET4, Host
from tests.chaos.processes import BedError, await_told, kill_told, run_here, told_pid

TOOLS = ("ip", "nft", "tc", "nsenter", "unshare")


def why_not() -> str:
    """Return why no cluster can be made here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "network and PID namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, timeout=20
    )
    return (
        ""
        if probe.returncode == 0
        else f"no namespaces here: {probe.stderr.decode(errors='replace').strip()}"
    )


class Cluster:
    """See the module. Made by `up`, found again by `attach`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = folder_of(name)
        self._children: list[subprocess.Popen[bytes]] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    @classmethod
    def up(cls, name: str, size: int, *, guarded: bool = True) -> Cluster:
        """
        Make a cluster of ``size`` hosts and boot them; a dead one's remains of the same name are
        cleared away first.

        Args:
            guarded: it goes down when this process ends, however it ends.
        """
        cluster = cls(name)
        cluster.down()
        cluster.folder.mkdir(mode=0o711)
        try:
            if guarded:
                cluster._guardian = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.guardian", name],
                    stdin=subprocess.PIPE,
                    cwd=Path(__file__).parents[2],
                    start_new_session=True,
                )
            cluster._start_switch()
            (cluster.folder / "size").write_text(str(size))
            for host in cluster:
                host.folder.mkdir()
                host.write_hosts({f"{NET4}{peer.index}": peer.name for peer in cluster})
            for host in cluster:
                host.boot()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """Return the cluster that another process made."""
        cluster = cls(name)
        if not (cluster.folder / "size").exists():
            raise BedError(f"there is no cluster {name!r}: make it with `netcluster up N`")
        return cluster

    def __getitem__(self, name: str) -> Host:
        if name not in (host.name for host in self):
            raise BedError(f"{name!r} is no host of cluster {self.name!r}")
        return Host(self, name)

    def __iter__(self) -> Iterator[Host]:
        """Yield the hosts in order, running or not."""
        return (
            Host(self, f"h{index + 1}") for index in range(int((self.folder / "size").read_text()))
        )

    def cut(self, one: str, other: str) -> None:
        """Drop what the two send to each other."""
        self[one].drop_from(self[other])
        self[other].drop_from(self[one])

    def one_way(self, sender: str, receiver: str) -> None:
        """Drop what ``sender`` sends to ``receiver``; the other direction stays open."""
        self[receiver].drop_from(self[sender])

    def heal(self) -> None:
        """Take all network faults away, on all hosts that run."""
        for host in self:
            if host.up:
                host.heal()

    def down(self, timeout: float = 10.0) -> None:
        """
        End every process of every host, and leave nothing behind. Bounded; may be called twice.
        """
        if (self.folder / "size").exists():
            for host in self:
                host.group.freeze(on=False)
                host.crash()
            for host in self:
                host.group.remove(timeout)
        kill_told(self.folder / "switch")
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._children.append(self._guardian)
            self._guardian = None
        for child in self._children:
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                child.kill()
        self._children.clear()

    def in_switch(self, *command: str, check: bool = True) -> None:
        """Run a command in the switch's network namespace."""
        run_here(
            "nsenter",
            f"--net=/proc/{told_pid(self.folder / 'switch')}/ns/net",
            *command,
            check=check,
        )

    def keep(self, child: subprocess.Popen[bytes]) -> None:
        """Reap ``child`` when the cluster goes down."""
        self._children.append(child)

    def _start_switch(self) -> None:
        """
        A process in a network namespace of its own; it has entered it once it has told its pid.
        """
        told = self.folder / "switch"
        tell = 'echo $$ >"$1.new" && mv "$1.new" "$1" && exec sleep infinity'
        self.keep(
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", tell, "sh", told],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        await_told(told, "the switch")
        bridge = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        self.in_switch("ip", "link", "add", "br0", *bridge)
        self.in_switch("ip", "link", "set", "br0", "up")


def folder_of(name: str) -> Path:
    """Return where a cluster keeps its state."""
    if not name.replace("-", "").isalnum():
        raise BedError(f"{name!r}: letters, digits and dashes make a cluster's name")
    return Path(tempfile.gettempdir()) / f"netcluster-{name}"
