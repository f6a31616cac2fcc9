"""Commands as a user runs them, on hosts that the tests made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdrun.launcher.stdlib_only import process_tree
from tests.lib import netns_hosts as hosts
from tests.lib import slurm_cluster as slurm
from tests.lib.netns_hosts import Hosts
from tests.lib.slurm_cluster import Slurm


@dataclass
class Run:
    """One command on a host, its output in files."""

    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def wait(self, timeout: float = 90.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            pytest.fail(
                f"still running after {timeout} s\n---"
                f" stdout\n{self.out[-3000:]}\n{self.err[-3000:]}"
            )

    def expect(self, text: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.out + self.err:
            ended = self.process.poll() is not None
            if ended and text in self.out + self.err:
                return
            if ended or time.monotonic() > deadline:
                pytest.fail(
                    f"{text!r} not seen\n--- stdout\n{self.out[-3000:]}\n---"
                    f" stderr\n{self.err[-3000:]}"
                )
            time.sleep(0.02)


@dataclass(frozen=True)
class JumpHost:
    """An sshd through which others are reached."""

    process: subprocess.Popen[bytes]
    config: Path
    """Of ssh, for the option ``-F``."""
    log: Path


@dataclass
class Cluster:
    """Hosts, and a folder that all of them see."""

    hosts: Hosts
    folder: Path
    runs: list[Run] = field(default_factory=list)

    def env(self) -> dict[str, str]:
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        home = str(self.folder)
        return {
            **keep,
            "HOME": home,
            "XDG_CONFIG_HOME": f"{home}/config",
            "XDG_STATE_HOME": f"{home}/state",
        }

    def script(self, text: str, name: str = "work.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(
        self, *argv: str, at: str = "h1", env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Run:
        """Start a command on a host; ``pdrun`` is this tree's."""
        words = [sys.executable, "-m", "pdrun", *argv[1:]] if argv[0] == "pdrun" else list(argv)
        number = len(self.runs)
        out, err = self.folder / f"run{number}.out", self.folder / f"run{number}.err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = self.hosts.start(
                at,
                words,
                cwd=cwd or self.folder,
                env={**self.env(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                process_group=0,
            )
        self.runs.append(Run(process, out, err))
        return self.runs[-1]

    def run(self, *argv: str, timeout: float = 90.0, **more: object) -> tuple[int, str, str]:
        job = self.start(*argv, **more)  # type: ignore[arg-type]
        return job.wait(timeout), job.out, job.err

    def inside(self, run: Run) -> int:
        """Pid of the command itself: nsenter is its parent."""
        found = subprocess.run(
            ["pgrep", "-P", str(run.process.pid)], text=True, capture_output=True
        )
        return int(found.stdout.split()[0])

    @contextlib.contextmanager
    def firewall(self, *accepted: str, verdict: str = "reject with tcp reset") -> Iterator[None]:
        """
        Let ssh, answers and what is accepted pass on h1 and h2, for the block.

        Args:
            accepted: ports of TCP.
            verdict: of nft, for the rest.
        """
        rules = "".join(f"tcp dport {ports} accept\n" for ports in ("22", *accepted))
        table = (
            "table inet pdrun_test {\nchain in { type filter hook input priority 0;\n"
            "ct state established,related accept\niif lo accept\nmeta l4proto != tcp accept\n"
            f"{rules}{verdict}\n}}\n}}"
        )
        spaces = [f"{self.hosts.tag}-{name}" for name in ("h1", "h2")]
        for space in spaces:
            hosts.run("ip", "netns", "exec", space, "nft", table)
        try:
            yield
        finally:
            for space in spaces:
                delete = ("nft", "delete table inet pdrun_test")
                hosts.run("ip", "netns", "exec", space, *delete, check=False)

    @contextlib.contextmanager
    def jump_host(self, *reached: str, limits: str = "200:30:400") -> Iterator[JumpHost]:
        """
        Run a second sshd on h1, through which ssh reaches some hosts.

        Args:
            reached: their names.
            limits: its MaxStartups.
        """
        config = (self.hosts.folder / "sshd_config").read_text()
        config = config.replace("Port 22\n", "Port 2200\n").replace("200:30:400", limits)
        (self.folder / "jump_config").write_text(config)
        log = self.folder / "jump.log"
        start = ["/usr/sbin/sshd", "-D", "-f", f"{self.folder}/jump_config", "-E", str(log)]
        client = self.folder / "ssh_config"
        options = f"Port 2200\nHostName {self.hosts.address('h1')}\nStrictHostKeyChecking no\n"
        options += "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        client.write_text(f"Host bastion\n{options}Host {' '.join(reached)}\nProxyJump bastion\n")
        made = JumpHost(subprocess.Popen([*self.hosts.enter("h1"), *start]), client, log)
        try:
            until(lambda: log.exists() and "listening" in log.read_text(), "the jump host listens")
            yield made
        finally:
            self.end_jump_host(made)
            made.process.wait(20)

    def end_jump_host(self, jump: JumpHost) -> None:
        """Kill the jump host's sshd and all connections through it."""
        root = process_tree.find_process(jump.process.pid)
        assert root is not None  # nsenter, which waits for its child
        for served in reversed([*process_tree.descendants([root])][1:]):
            process_tree.kill_process(served)

    def nothing_left(self, timeout: float = 15.0, but: Sequence[str] = ()) -> None:
        """Wait until no process of any job is left on any host."""
        deadline = time.monotonic() + timeout
        while left := [
            one for one in self.hosts.of_pdrun() if not any(text in one[2] for text in but)
        ]:
            if time.monotonic() > deadline:
                pytest.fail(f"left after {timeout} s: {left}")
            time.sleep(0.05)


def until(condition: object, what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            pytest.fail(f"not reached within {timeout} s: {what}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """h1, h2 and h3, for the whole session."""
    if why := hosts.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    for path in (folder, *folder.parents):
        if path != Path("/tmp") and path.is_relative_to("/tmp"):
            path.chmod(
                path.stat().st_mode | 0o011
            )  # sshd and slurmd read files here as other users
    with hosts.hosts(folder, 3, slurm.CGROUPS) as made:
        yield made


@pytest.fixture
def cluster(three: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    """
    The hosts, with a folder and a home of the test's own; what the test left running is killed.
    """
    made = Cluster(three, tmp_path)
    yield made
    left = [job for job in made.runs if job.process.poll() is None]
    if left:  # a failed test: nsenter's child outlives it
        kill_all(three)
    for job in left:
        job.process.kill()
        job.process.wait(20)
    try:
        made.nothing_left()
    finally:
        kill_all(three)  # one test's leftovers must not fail the next ones


def kill_all(three: Hosts) -> None:
    """Kill every process of pdrun that is left on the hosts."""
    for _, pid, _ in three.of_pdrun():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def slurmed(three: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """Slurm on h1, h2 and h3, for the whole session; it ends with the hosts."""
    if why := slurm.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o711)
    made = Slurm(three, folder)
    made.up()
    return made
