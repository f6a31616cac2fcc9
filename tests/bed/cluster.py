"""
N little hosts on one machine: each has its own network, processes, host name, /run, /dev/shm and /etc/hosts.

    cluster = Cluster.up("demo", 3)            h1 h2 h3 at 10.77.0.1 to .3 and fd77::1 to ::3
    cluster["h2"].run("hostname")
    cluster["h2"].crash()                      peers get a reset, as from a kernel that goes on
    cluster["h3"].power_off()                  peers get nothing, ever
    cluster.down()

A host is a PID namespace whose first process ("init") holds the others; the switch is a process whose network
namespace holds a bridge with no way out, so no packet can leave the machine. Nothing has a name outside the folder of
the cluster: any number of them exist side by side with the same addresses. Killing an init ends every process of its
host, so `down` always succeeds; a guardian calls it should the owner die (see `guardian.py`). Needs root, Linux,
iproute2, nftables and util-linux.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.bed import clocks
from tests.bed.groups import Group

NET4, NET6 = "10.77.0.", "fd77::"
TOOLS = ("ip", "nft", "tc", "nsenter", "unshare")
BOOT_TIMEOUT = 20.0
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
JOIN = 'cd "$1" && shift && while [ "$1" != -- ]; do echo 0 >"$1" || exit 125; shift; done && shift && exec "$@"'
"""``sh -c JOIN sh FOLDER [CGROUP.PROCS ...] -- COMMAND``"""


class BedError(Exception):
    """The bed cannot do what was asked; the text says what and why."""


def why_not() -> str:
    """Return why no cluster can be made here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "network and PID namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True, timeout=20)
    return "" if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode(errors='replace').strip()}"


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
        Make a cluster of ``size`` hosts and boot them; a dead one's remains of the same name are cleared away first.

        Args:
            guarded: it goes down when this process ends, however it ends.
        """
        cluster = cls(name)
        cluster.down()
        cluster.folder.mkdir(mode=0o711)
        try:
            if guarded:
                cluster._guardian = subprocess.Popen(
                    [sys.executable, "-m", "tests.bed.guardian", name],
                    stdin=subprocess.PIPE, cwd=Path(__file__).parents[2], start_new_session=True,
                )  # fmt: skip
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
        return (Host(self, f"h{index + 1}") for index in range(int((self.folder / "size").read_text())))

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
        """End every process of every host, and leave nothing behind. Bounded; may be called twice."""
        if (self.folder / "size").exists():
            for host in self:
                host.group.freeze(on=False)
                host.crash()
            for host in self:
                host.group.remove(timeout)
        _kill(self.folder / "switch")
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
        _run("nsenter", f"--net=/proc/{_pid(self.folder / 'switch')}/ns/net", *command, check=check)

    def keep(self, child: subprocess.Popen[bytes]) -> None:
        """Reap ``child`` when the cluster goes down."""
        self._children.append(child)

    def _start_switch(self) -> None:
        """A process in a network namespace of its own; it has entered it once it has told its pid."""
        told = self.folder / "switch"
        tell = 'echo $$ >"$1.new" && mv "$1.new" "$1" && exec sleep infinity'
        self.keep(subprocess.Popen(
            ["unshare", "--net", "sh", "-c", tell, "sh", told],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        ))  # fmt: skip
        _await_file(told, "the switch")
        bridge = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        self.in_switch("ip", "link", "add", "br0", *bridge)
        self.in_switch("ip", "link", "set", "br0", "up")


class Host:
    """One host of a cluster; holds no state but on disk, so any number of these may name the same one."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name, self.index = cluster, name, int(name[1:])
        self.folder = cluster.folder / name
        """The host's own disk, as seen from everywhere."""
        self.address = f"{NET4}{self.index}"
        self.address6 = f"{NET6}{self.index}"
        self.port = f"p{self.index}"
        """Its port at the switch."""
        self.group = Group(f"netcluster-{cluster.name}-{name}")

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of its init on the machine; 0 while it is down."""
        return _pid(self.folder / "pid")

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
        clock = ["--time", "--monotonic", str(monotonic), "--boottime", str(monotonic)] if monotonic else []
        (self.folder / "clock").write_text("time" if monotonic else "")
        self.group.make_freezable()
        with (self.folder / "init.log").open("wb") as log:
            self.cluster.keep(subprocess.Popen(
                ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", *clock, "--fork", "--kill-child=KILL",
                 "sh", "-c", INIT, "init", self.folder, self.name],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            ))  # fmt: skip
        _await_file(self.folder / "pid", self.name, self.folder / "init.log")
        self._plug()

    def crash(self) -> None:
        """Kill every process of it at once; its kernel tells the peers. It is down when this returns."""
        if pid := self.pid:
            _send(pid, signal.SIGKILL)
            for parent in self._parents():  # nsenter stops with its child, and a child that nobody reaps holds init up
                _send(parent, signal.SIGCONT)
        _kill(self.folder / "pid")

    def power_off(self) -> None:
        """As when the power goes: the cable first, so that peers are told nothing, then every process."""
        self.cluster.in_switch("ip", "link", "del", self.port, check=False)
        self.crash()

    def freeze(self) -> None:
        """Stop all of its processes but init at once, as a machine that hangs; its kernel still answers TCP."""
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

    # Processes --------------------------------------------------------------------------------------------------------

    def command(self, *command: str, cwd: Path | str = "/") -> list[str]:
        """Return the command line that runs ``command`` on this host when the machine executes it."""
        if not (pid := self.pid):
            raise BedError(f"{self.name} is down")
        clock = ["--time"] if (self.folder / "clock").read_text() else []
        into = ["nsenter", "-t", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", *clock]
        return [*into, "--", "sh", "-c", JOIN, "sh", str(cwd), *self.group.joins(), "--", *command]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` with what this host's wall clock needs, where it was moved."""
        return {**env, **clocks.variables(self.folder)}

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | str = "/",
        stdout: int | IO[Any] = subprocess.DEVNULL, stderr: int | IO[Any] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a command on the host; what is returned ends with its code, `pid_of` tells its process."""
        return subprocess.Popen(
            self.command(*command, cwd=cwd), env=self.environment(os.environ if env is None else env),
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip

    def run(self, *command: str, timeout: float = 20.0, check: bool = True) -> str:
        """Run a command on the host to its end; return its output."""
        return _run(*self.command(*command), timeout=timeout, check=check, env=self.environment(os.environ))

    def processes(self) -> dict[int, str]:
        """Machine-wide pid -> command line of every process on the host, but its init and what has ended."""
        init = self.pid
        space = _namespace(init) if init else None
        found = {}
        for pid in _pids() if space else ():
            if pid != init and _namespace(pid) == space and (words := _command_line(pid)) not in ("", "sleep 1000"):
                found[pid] = words
        return found

    def _parents(self) -> set[int]:
        """Processes outside whose children are on the host: what `start` left waiting for their end."""
        space, found = _namespace(self.pid), set()
        for pid in _pids():
            if _command_line(pid).startswith("nsenter") and any(_namespace(child) == space for child in _children(pid)):
                found.add(pid)
        return found

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self.processes():
            _send(pid, number)

    # Network ----------------------------------------------------------------------------------------------------------

    def in_net(self, *command: str, check: bool = True) -> None:
        """Run a command of the machine in the host's network namespace."""
        _run("nsenter", f"--net=/proc/{self.pid}/ns/net", *command, check=check)

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
        """Lose packets above ``size`` bytes that come in, and tell nobody: a path whose MTU is not discovered."""
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
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *(f"{at} {name}" for at, name in names.items())]
        with (self.folder / "hosts").open("w") as file:  # the same file: it is mounted over /etc/hosts
            file.write("\n".join(lines) + "\n")

    def skew(self, seconds: int) -> None:
        """Move its wall clock, for what starts from now on; called again, the clock jumps for what runs, too."""
        clocks.set_offset(self.folder, seconds)

    def _plug(self) -> None:
        self.cluster.in_switch("ip", "link", "del", self.port, check=False)  # a crashed host's, not yet cleared away
        mac = f"02:00:00:00:00:{self.index:02x}"  # of its own, as a card has: peers remember it over a boot
        peer = ("type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(self.pid))
        self.cluster.in_switch("ip", "link", "add", self.port, *peer)
        self.cluster.in_switch("ip", "link", "set", self.port, "master", "br0", "up")
        self.in_net("sh", "-c", (
            "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad; ip link set lo up && "
            f"ip addr add {self.address}/24 dev eth0 && ip addr add {self.address6}/64 dev eth0 nodad && "
            "ip link set eth0 up gso_max_segs 1"  # segments as on a real wire: filters look at their sizes
        ))  # fmt: skip


def folder_of(name: str) -> Path:
    """Return where a cluster keeps its state."""
    if not name.replace("-", "").isalnum():
        raise BedError(f"{name!r}: letters, digits and dashes make a cluster's name")
    return Path(tempfile.gettempdir()) / f"netcluster-{name}"


def pid_of(started: subprocess.Popen[bytes], timeout: float = 10.0) -> int:
    """Return the machine-wide pid of the command that `Host.start` started."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for child in _children(started.pid):
            if (words := _command_line(child)) and not words.startswith(("nsenter", "sh -c cd")):  # now the command
                return child
        if started.poll() is not None:
            break
        time.sleep(0.005)
    raise BedError("the command has not started, or has ended")


def _run(
    *command: str | Path, timeout: float = 20.0, check: bool = True, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, timeout=timeout, env=env,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    if check and done.returncode:
        raise BedError(f"{' '.join(map(str, command[-6:]))}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def _await_file(path: Path, what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise BedError(f"{what} did not come up: {log.read_text() if log else ''}")
        time.sleep(0.002)
    pid = int(path.read_text())
    path.write_text(json.dumps([pid, _started(pid)]))


def _pid(path: Path) -> int:
    """Return the pid that a file tells, 0 where that very process is no more."""
    try:
        pid, started = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return 0
    return pid if _started(pid) == started else 0


def _kill(path: Path, timeout: float = 10.0) -> None:
    """Kill the process that a file tells and wait until it is gone, and with it its namespace's other processes."""
    deadline = time.monotonic() + timeout
    while pid := _pid(path):
        _send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise BedError(f"process {pid} does not end")
        time.sleep(0.005)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _started(pid: int) -> int | None:
    """Start of a process in ticks since boot, which tells it from a later one with its pid; None: it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _command_line(pid: int) -> str:
    """Words of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def words_of(found: Sequence[Host]) -> str:
    """Return what runs on the hosts, for messages."""
    return "\n".join(f"{host.name} {pid}: {words}" for host in found for pid, words in host.processes().items())
