"""
A few hosts on this machine, for tests: namespaces of network, pids, mounts and host name, each with
a real sshd.

    sw   the switch: a bridge in a namespace of its own, with no way out
    h1   10.79.N.1 ...   its own /etc/hosts, ~/.ssh, /run and process table; files are shared, as by NFS

Everything hangs on one process a host, its init: to kill that one is to cut the power of the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PYTHONS = "/usr/sbin:/usr/bin:/sbin:/bin"
DOWN_SECONDS = 60.0
"""Time for the kernel to end all processes of a host, on a machine that others use as well."""
NEEDED = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def missing() -> str:
    """Return why no hosts can be made here, or the empty string."""
    if os.geteuid() != 0:
        return "needs root for namespaces"
    if lacking := [name for name in NEEDED if shutil.which(name) is None]:
        return (
            f"needs {', '.join(lacking)} (Debian: iproute2 util-linux openssh-client"
            " openssh-server)"
        )
    try:
        name = f"pdrun-probe-{os.getpid()}"  # tests run in several processes
        made = run("ip", "netns", "add", name, check=False)
        run("ip", "netns", "del", name, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


def run(*argv: str, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=check, text=True, capture_output=True, timeout=60, **more)


@dataclass
class Hosts:
    """See the module. `up`, then `start` what is to run on a host; `down` ends everything."""

    folder: Path
    count: int
    tag: str
    net: str
    inits: dict[str, int] = field(default_factory=dict)
    mounts: Sequence[str] = ()
    """More lines for each host's start; ``$H`` is its name."""

    @property
    def names(self) -> list[str]:
        return [f"h{number}" for number in range(1, self.count + 1)]

    def address(self, name: str) -> str:
        return f"{self.net}.{name[1:]}"

    def up(self) -> None:
        self._keys()
        run("ip", "netns", "add", f"{self.tag}-sw")
        for words in ("link add br0 type bridge", "link set br0 up", "link set lo up"):
            run("ip", "-n", f"{self.tag}-sw", *words.split())
        for name in self.names:
            self._wire(name)
        for name in self.names:
            self.boot(name)

    def _keys(self) -> None:
        folder, ssh = self.folder, self.folder / "ssh"
        ssh.mkdir(mode=0o700)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/hostkey")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{ssh}/id_ed25519")
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        (ssh / "known_hosts").write_text(
            "".join(f"{name},{self.address(name)} {key}\n" for name in self.names)
        )
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{self.address(name)} {name}\n" for name in self.names)
        )
        (folder / "sshd_config").write_text(
            textwrap.dedent(f"""
            Port 22
            HostKey {folder}/hostkey
            PasswordAuthentication no
            PermitRootLogin prohibit-password
            UsePAM no
            StrictModes no
            MaxStartups 200:30:400
            AuthorizedKeysFile {ssh}/authorized_keys
            PidFile none
        """)
        )

    def _wire(self, name: str) -> None:
        inside, port = f"{self.tag}-{name}", f"p{name[1:]}"
        run("ip", "netns", "add", inside)
        run("ip", "-n", inside, "link", "set", "lo", "up")
        run(
            "ip",
            "-n",
            inside,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            f"{self.tag}-sw",
        )
        run("ip", "-n", f"{self.tag}-sw", "link", "set", port, "master", "br0", "up")
        run("ip", "-n", inside, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        run("ip", "-n", inside, "link", "set", "eth0", "up")

    def boot(self, name: str) -> None:
        folder = self.folder
        ready = folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        script = "\n".join(
            [
                "set -e",
                f"H={name}",
                "mount --make-rprivate /",
                "mount -t tmpfs -o mode=755 tmpfs /run",
                "mkdir -p /run/sshd /root/.ssh",
                f"mount --bind {folder}/hosts /etc/hosts",
                f"mount --bind {folder}/ssh /root/.ssh",
                f"hostname {name}",
                "mount -t proc proc /proc",
                *self.mounts,
                f"/usr/sbin/sshd -f {folder}/sshd_config -E {folder}/{name}.sshd",
                f"echo up > {ready}",
                "trap : TERM INT HUP",
                "while :; do sleep 1000 & wait; done",
            ]
        )
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                f"{self.tag}-{name}",
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child=KILL",
                "bash",
                "-c",
                script,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{name}.init").open("wb"),
            start_new_session=True,
        )
        deadline = time.monotonic() + 30
        while not ready.exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{name} did not start: {(folder / f'{name}.init').read_text()}")
            time.sleep(0.01)
        self.inits[name] = int(run("pgrep", "-P", str(process.pid)).stdout.split()[0])
        self._outer = [*getattr(self, "_outer", []), process]

    def enter(self, name: str) -> list[str]:
        """Return the words that run a command on a host, as at its console."""
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["nsenter", "-t", str(self.inits[name]), *spaces, f"--wd={Path.cwd()}", "--"]

    def start(
        self, name: str, argv: Sequence[str], *, cwd: Path, env: dict[str, str], **more: object
    ) -> subprocess.Popen[bytes]:
        words = [*self.enter(name)[:-2], f"--wd={cwd}", "--", *argv]
        return subprocess.Popen(words, env=env, cwd=cwd, **more)

    def processes(self, name: str) -> list[tuple[int, str]]:
        """
        Pid (outside) and command of everything on a host but its init, its sshd's listener and our
        own look.
        """
        space = Path(f"/proc/{self.inits[name]}/ns/pid").readlink()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "ns/pid").readlink() == space and int(path.name) != self.inits[name]:
                    command = (
                        (path / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                        .strip()
                    )
                    if command and not command.startswith(("sleep 1000", "sshd: /usr/sbin/sshd")):
                        found.append((int(path.name), command))
        return found

    def of_pdrun(self) -> list[tuple[str, int, str]]:
        """Everything of a job that is left on any host: pdrun's own processes and workers."""
        return [
            (name, pid, command)
            for name in self.names
            if name in self.inits
            for pid, command in self.processes(name)
            if "python" in command or "pdrun" in command
        ]

    def power_off(self, name: str) -> None:
        os.kill(self.inits.pop(name), signal.SIGKILL)

    def down(self) -> None:
        for name in list(self.inits):
            with contextlib.suppress(ProcessLookupError):
                self.power_off(name)
        try:
            for process in getattr(self, "_outer", []):
                process.wait(DOWN_SECONDS)
        finally:
            for name in [*self.names, "sw"]:
                run("ip", "netns", "del", f"{self.tag}-{name}", check=False)


_made = 0


@contextlib.contextmanager
def hosts(folder: Path, count: int, mounts: Sequence[str] = ()) -> Iterator[Hosts]:
    """Hosts h1 to h``count``, gone at the end of the block."""
    global _made
    _made += 1
    made = Hosts(
        folder,
        count,
        f"pdt{os.getpid()}-{_made}",
        f"10.79.{os.getpid() % 200 + _made % 50}",
        mounts=mounts,
    )
    try:
        made.up()
        yield made
    finally:
        made.down()
