"""The bed itself: what a fault does to a connection, and that nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import clocks
from tests.chaos.cluster import folder_of
from tests.chaos.jobs import Bed
from tests.chaos.processes import BedError
from tests.e2e.conftest import alive, until

ROOT = Path(__file__).parents[2]
TALK = """
import socket, sys, time
server = socket.create_server(("", 9000)) if sys.argv[1] == "listen" else None
deadline = time.monotonic() + 10
if server: server.settimeout(15)
while server is None:
    try:
        link = socket.create_connection((sys.argv[1], 9000), 1)
        break
    except OSError:
        if time.monotonic() > deadline: raise
        time.sleep(0.05)
else:
    link = server.accept()[0]
print("connected", flush=True)
link.settimeout(float(sys.argv[2]))
try:
    print("end" if not link.recv(10) else "data", flush=True)
except TimeoutError:
    print("silence", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


def talk(
    bed: Bed, one: str, other: str, timeout: float
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """
    Connect ``other`` to ``one``; each says how the connection ended.

    Or that it heard nothing: ``other`` for ``timeout``, and ``one``, which must not be the first to
    go, for long.
    """
    pair = tuple(
        bed[name].start(
            sys.executable,
            "-c",
            TALK,
            target,
            str(quiet),
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        for name, target, quiet in ((one, "listen", 60), (other, one, timeout))
    )
    for side in pair:
        assert side.stdout is not None and side.stdout.readline() == b"connected\n"
    return pair


def last_word(side: subprocess.Popen[bytes]) -> str:
    # communicate() would pass over what readline has buffered already
    side.wait(timeout=20)
    assert side.stdout is not None
    return side.stdout.read().decode().strip()


def test_hosts_reach_each_other_and_nothing_else(bed: Bed) -> None:
    assert bed["h1"].run("hostname").strip() == "h1"
    assert last_word(talk(bed, "h1", "h3", 0.1)[1]) == "silence"
    routes = bed["h2"].run("ip", "route").split("\n")
    assert [line.split()[0] for line in routes if line] == ["10.77.0.0/24"]
    with pytest.raises(BedError, match="no host"):
        bed["h4"]


def test_a_crash_is_told_by_the_kernel_and_a_power_cut_by_nobody(bed: Bed) -> None:
    _, watcher = talk(bed, "h2", "h1", 5)
    bed["h2"].crash()
    assert last_word(watcher) in ("end", "ConnectionResetError")
    assert not bed["h2"].up
    bed["h2"].boot()
    _, watcher = talk(bed, "h2", "h1", 1.5)
    bed["h2"].power_off()
    bed["h2"].boot()
    assert last_word(watcher) == "silence"


def test_faults_of_the_network_and_their_healing(bed: Bed) -> None:
    def reach(sender: str, receiver: str) -> bool:
        probe = (
            f"import socket\ntry: socket.create_connection(('{receiver}', 22), 0.4)\n"
            "except OSError as error: print(type(error).__name__)"
        )
        # nobody listens there: it is the host itself that answers
        return bed[sender].run(sys.executable, "-c", probe).strip() == "ConnectionRefusedError"

    bed.cluster.cut("h1", "h2")
    assert (
        not reach("h1", "h2") and not reach("h2", "h1") and reach("h1", "h3") and reach("h2", "h3")
    )
    bed.cluster.heal()
    until(lambda: reach("h1", "h2"), "healed")
    bed["h3"].link(False)
    assert not reach("h3", "h1") and not reach("h1", "h3")
    bed["h3"].heal()
    until(lambda: reach("h3", "h1"), "plugged in again")
    bed["h2"].reject(22)
    assert reach("h1", "h2")
    bed.cluster.heal()
    bed["h2"].loss(99)
    assert not all(reach("h1", "h2") for _ in range(3))  # one probe in a hundred comes through


def test_one_way_means_one_way(bed: Bed) -> None:
    """What h1 sends arrives at h2; h1 hears nothing of it."""
    bed.cluster.one_way("h2", "h1")
    listen = (
        "import socket, sys\nears = socket.socket(type=socket.SOCK_DGRAM)\nears.bind(('', 9))\n"
        "ears.settimeout(float(sys.argv[1]))\nprint('up', flush=True)\nprint(ears.recv(9))"
    )
    say = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 9))"
    for sender, receiver, heard in (("h1", "h2", True), ("h2", "h1", False)):
        ear = bed[receiver].start(
            sys.executable, "-c", listen, "5" if heard else "0.5", stdout=subprocess.PIPE
        )
        assert ear.stdout is not None and ear.stdout.readline() == b"up\n"
        bed[sender].run(sys.executable, "-c", say, receiver)
        assert (last_word(ear) != "") == heard


def test_a_frozen_host_does_nothing_until_it_thaws(bed: Bed) -> None:
    ticks = bed.folder / "ticks"
    bed["h2"].start("sh", "-c", f"while :; do echo >>{ticks}; sleep 0.01; done")
    until(ticks.exists, "it runs")
    bed["h2"].freeze()
    seen: list[int] = []

    def stands_still() -> bool:
        seen.append(ticks.stat().st_size)
        return len(seen) > 40 and len(set(seen[-40:])) == 1

    until(stands_still, "it stands still", 10)
    before = seen[-1]
    bed["h2"].thaw()
    until(lambda: ticks.stat().st_size > before, "it runs again", 5)


@pytest.mark.skipif(bool(clocks.why_not()), reason=clocks.why_not())
def test_clocks_of_a_hosts_own(bed: Bed) -> None:
    show = "import time; print(time.time(), time.monotonic())"

    def read(name: str) -> tuple[float, float]:
        wall, monotonic = map(float, bed[name].run(sys.executable, "-c", show).split())
        return wall, monotonic

    bed["h2"].skew(3600)
    bed["h3"].crash()
    bed["h3"].boot(monotonic=100_000)
    (wall1, mono1), (wall2, mono2), (wall3, mono3) = read("h1"), read("h2"), read("h3")
    assert 3590 < wall2 - wall1 < 3620 and abs(mono2 - mono1) < 20
    assert 99_990 < mono3 - mono1 < 100_020 and abs(wall3 - wall1) < 20


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_goes_with_its_owner(possible: None, end: int) -> None:
    """Frozen processes, too; and with the processes everything that the cluster kept on disk."""
    name = f"owned-{os.getpid()}"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import sys, time\nfrom tests.chaos.cluster import Cluster\n"
                f"cluster = Cluster.up({name!r}, 2)\n"
                "cluster['h1'].start('sleep', '3000')\ncluster['h2'].start('setsid', 'sleep', '3000')\n"
                "while not all(host.processes() for host in cluster): time.sleep(0.01)\n"
                "cluster['h2'].freeze()\n"
                "print(*[pid for host in cluster for pid in (host.pid, *host.processes())], flush=True)\ntime.sleep(300)\n"
            ),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 4 and all(map(alive, pids))
    owner.send_signal(end)
    owner.wait(10)
    until(lambda: not any(map(alive, pids)) and not folder_of(name).exists(), "nothing is left", 20)


def test_two_clusters_side_by_side_do_not_meet(make_bed: Callable[[int], Bed]) -> None:
    one, other = make_bed(1), make_bed(2)
    server, _ = talk(other, "h1", "h2", 5)
    assert "9000" not in one["h1"].run("cat", "/proc/net/tcp")
    one.cluster.down()
    assert server.poll() is None and other["h2"].up


def test_the_command_line(possible: None) -> None:
    env = {**os.environ, "NETCLUSTER_NAME": f"cli-{os.getpid()}"}

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/netcluster", *words],
            env=env,
            capture_output=True,
            timeout=60,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    try:
        assert run("exec", "h1", "true")[0] == 1
        assert run("up", "2")[0] == 0
        assert run("exec", "h2", "sh", "-c", "hostname; exit 7")[:2] == (7, "h2\n")
        assert run("crash", "h2")[0] == 0
        assert "h2 is down" in run("exec", "h2", "true")[2]
        assert run("boot", "h2")[0] == 0 and run("exec", "h2", "true")[0] == 0
        assert run("cut", "h1", "h2")[0] == 0 and run("heal")[0] == 0
        assert run("explode", "h1")[0] == 2 and run("loss", "h9", "3")[0] == 1
    finally:
        assert run("down")[0] == 0
    assert not folder_of(env["NETCLUSTER_NAME"]).exists()
