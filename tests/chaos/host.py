"""
One host of a cluster: its life, its processes, its network, its clocks.

It is a PID namespace whose first process ("init") holds the others, with network, mount, UTS and
IPC namespaces of its own. Killing init ends everything on the host.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.chaos import clocks
from tests.chaos.groups import Group
from tests.chaos.processes import (
    BedError,
    all_pids,
    await_told,
    children,
    command_line,
    kill_told,
    namespace,
    run_here,
    send,
    told_pid,
)

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster

NET4, NET6 = "10.77.0.", "fd77::"
INIT = r"""
read pid rest </proc/self/stat          # as the machine sees it: /proc is still the machine's
mount --make-rprivate / || exit
mount -t proc proc /proc || exit
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
cat /proc/sys/kernel/hostname >"$1/booted"
echo "$pid" >"$1/pid.new" && mv "$1/pid.new" "$1/pid"
trap : TERM INT HUP
while :; do sleep 1000 & wait; done     # an init: reaps what is left to it
"""
JOIN = (
    'cd "$1" && shift && while [ "$1" != -- ]; do echo 0 >"$1" || exit 125; shift; done && shift &&'
    ' exec "$@"'
)
"""``sh -c JOIN sh FOLDER [CGROUP.PROCS ...] -- COMMAND``"""


class Host:
    """
    One host of a cluster; holds no state but on disk, so any number of these may name the same one.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name, self.index = cluster, name, int(name[1:])
        self.folder = cluster.folder / name
        """The host's own disk, as seen from everywhere."""
        self.address = f"{NET4}{self.index}"
        self.address6 = f"{NET6}{self.index}"
        self.port = f"p{self.index}"
        """Its port at the switch."""
        self.group = Group(f"netcluster-{cluster.name}-{name}")

    # Life
    # --------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of its init on the machine; 0 while it is down."""
        return told_pid(self.folder / "pid")

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.pid > 0

    def boot(self, *, monotonic: int = 0) -> None:
        """
        Start it, plugged in and without faults.

        Args:
            monotonic: seconds by which its monotonic clock stands ahead of the machine's.
        """
        if self.up:
            raise BedError(f"{self.name} runs already")
        (self.folder / "pid").unlink(missing_ok=True)
        clock = (
            ["--time", "--monotonic", str(monotonic), "--boottime", str(monotonic)]
            if monotonic
            else []
        )
        (self.folder / "clock").write_text("time" if monotonic else "")
        self.group.make_freezable()
        with (self.folder / "init.log").open("wb") as log:
            self.cluster.keep(
                subprocess.Popen(
                    [
                        "unshare",
                        "--mount",
                        "--uts",
                        "--ipc",
                        "--net",
                        "--pid",
                        *clock,
                        "--fork",
                        "--kill-child=KILL",
                        "sh",
                        "-c",
                        INIT,
                        "init",
                        self.folder,
                        self.name,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        await_told(self.folder / "pid", self.name, self.folder / "init.log")
        self._plug()

    def crash(self) -> None:
        """
        Kill every process of it at once; its kernel tells the peers. It is down when this returns.
        """
        if pid := self.pid:
            send(pid, signal.SIGKILL)
            for parent in (
                self._parents()
            ):  # nsenter stops with its child, and a child that nobody reaps holds init up
                send(parent, signal.SIGCONT)
        kill_told(self.folder / "pid")

    def power_off(self) -> None:
        """
        As when the power goes: the cable first, so that peers are told nothing, then every process.
        """
        self.cluster.in_switch("ip", "link", "del", self.port, check=False)
        self.crash()

    def freeze(self) -> None:
        """
        Stop all of its processes but init at once, as a machine that hangs; its kernel still
        answers TCP.
        """
        if self.group.freezable:
            self.group.freeze()
        else:
            self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen host go on."""
        if self.group.freezable:
            self.group.freeze(on=False)
        else:
            self._signal_all(signal.SIGCONT)

    # Processes
    # --------------------------------------------------------------------------------------------

    def command(self, *command: str, cwd: Path | str = "/") -> list[str]:
        """
        Return the command line that runs ``command`` on this host when the machine executes it.
        """
        if not (pid := self.pid):
            raise BedError(f"{self.name} is down")
        clock = ["--time"] if (self.folder / "clock").read_text() else []
        into = ["nsenter", "-t", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", *clock]
        return [*into, "--", "sh", "-c", JOIN, "sh", str(cwd), *self.group.joins(), "--", *command]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` with what this host's wall clock needs, where it was moved."""
        return {**env, **clocks.variables(self.folder)}

    def start(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/",
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """
        Start a command on the host; what is returned ends with its code, `pid_of` tells its
        process.
        """
        return subprocess.Popen(
            self.command(*command, cwd=cwd),
            env=self.environment(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def run(self, *command: str, timeout: float = 20.0, check: bool = True) -> str:
        """Run a command on the host to its end; return its output."""
        return run_here(
            *self.command(*command), timeout=timeout, check=check, env=self.environment(os.environ)
        )

    def processes(self) -> dict[int, str]:
        """
        Machine-wide pid -> command line of every process on the host, but its init and what has
        ended.
        """
        init = self.pid
        space = namespace(init) if init else None
        found = {}
        for pid in all_pids() if space else ():
            if (
                pid != init
                and namespace(pid) == space
                and (words := command_line(pid)) not in ("", "sleep 1000")
            ):
                found[pid] = words
        return found

    def _parents(self) -> set[int]:
        """
        Processes outside whose children are on the host: what `start` left waiting for their end.
        """
        space, found = namespace(self.pid), set()
        for pid in all_pids():
            if command_line(pid).startswith("nsenter") and any(
                namespace(child) == space for child in children(pid)
            ):
                found.add(pid)
        return found

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self.processes():
            send(pid, number)

    # Network
    # --------------------------------------------------------------------------------------------

    def in_net(self, *command: str, check: bool = True) -> None:
        """Run a command of the machine in the host's network namespace."""
        run_here("nsenter", f"--net=/proc/{self.pid}/ns/net", *command, check=check)

    def link(self, up: bool) -> None:
        """Plug the cable in, or pull it."""
        self.cluster.in_switch("ip", "link", "set", self.port, "up" if up else "down")

    def drop_from(self, peer: Host) -> None:
        """Lose everything that comes in from ``peer``."""
        self.rule("in", f"ip saddr {peer.address} drop")
        self.rule("in", f"ip6 saddr {peer.address6} drop")

    def loss(self, percent: int) -> None:
        """Lose so much of what comes in, at random."""
        if not 0 < percent < 100:
            raise BedError(f"{percent} % of loss: 1 to 99 (or cut the link)")
        self.rule("in", f"iifname eth0 numgen random mod 100 < {percent} drop")

    def reject(self, port: int) -> None:
        """Answer connections to ``port`` with a reset."""
        self.rule("in", f"tcp dport {port} reject with tcp reset")

    def black_hole(self, size: int) -> None:
        """
        Lose packets above ``size`` bytes that come in, and tell nobody: a path whose MTU is not
        discovered.
        """
        self.rule("in", f"iifname eth0 meta length > {size} drop")

    def rate(self, rate: str) -> None:
        """Slow its link down, both ways: ``200kbit``."""
        shape = ("root", "tbf", "rate", rate, "burst", "4kb", "latency", "2s")
        self.cluster.in_switch("tc", "qdisc", "replace", "dev", self.port, *shape)
        self.in_net("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def rule(self, chain: str, rule: str) -> None:
        """Add a packet filter rule of nft's; ``chain`` is ``in`` or ``out``."""
        hooks = "\n".join(
            f"chain {name} {{ type filter hook {hook} priority -300; }}"
            for name, hook in (("in", "input"), ("out", "output"))
        )
        self.in_net("nft", f"table inet fault {{\n{hooks}\n}}\nadd rule inet fault {chain} {rule}")

    def heal(self) -> None:
        """Take all network faults of this host away."""
        self.in_net("nft", "delete", "table", "inet", "fault", check=False)
        self.in_net("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        self.cluster.in_switch("tc", "qdisc", "del", "dev", self.port, "root", check=False)
        self.link(True)

    def write_hosts(self, names: Mapping[str, str]) -> None:
        """Write its /etc/hosts: address -> name, besides localhost. Takes effect at once."""
        lines = [
            "127.0.0.1 localhost",
            "::1 localhost ip6-localhost",
            *(f"{at} {name}" for at, name in names.items()),
        ]
        with (self.folder / "hosts").open(
            "w"
        ) as file:  # the same file: it is mounted over /etc/hosts
            file.write("\n".join(lines) + "\n")

    def skew(self, seconds: int) -> None:
        """
        Move its wall clock, for what starts from now on; called again, the clock jumps for what
        runs, too.
        """
        clocks.set_offset(self.folder, seconds)

    def _plug(self) -> None:
        self.cluster.in_switch(
            "ip", "link", "del", self.port, check=False
        )  # a crashed host's, not yet cleared away
        # of its own, as a card has: peers remember it over a boot
        mac = f"02:00:00:00:00:{self.index:02x}"
        peer = ("type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(self.pid))
        self.cluster.in_switch("ip", "link", "add", self.port, *peer)
        self.cluster.in_switch("ip", "link", "set", self.port, "master", "br0", "up")
        self.in_net(
            "sh",
            "-c",
            (
                "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad; ip link set lo up && "
                f"ip addr add {self.address}/24 dev eth0 && ip addr add {self.address6}/64 dev eth0"
                " nodad && "
                # segments as on a real wire: filters look at their sizes
                "ip link set eth0 up gso_max_segs 1"
            ),
        )


def words_of(found: Sequence[Host]) -> str:
    """Return what runs on the hosts, for messages."""
    return "\n".join(
        f"{host.name} {pid}: {words}" for host in found for pid, words in host.processes().items()
    )
