"""The command line of the bed (`scripts/netcluster`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.chaos.cluster import Cluster
from tests.chaos.host import Host, words_of
from tests.chaos.processes import BedError

USAGE = """\
netcluster: N little hosts on one machine, in namespaces, with faults to order (root only)

  netcluster up N             make hosts h1 ... hN: 10.77.0.1 ... and fd77::1 ...; nothing else can be reached
  netcluster exec hI CMD ...  run a command on a host
  netcluster ps               what runs on which host
  netcluster crash hI         kill every process; peers are told by the kernel (FIN, RST)
  netcluster poweroff hI      the same without a word to the peers (half-open connections)
  netcluster boot hI          start a host that is down
  netcluster link hI up|down  plug the cable in, or pull it
  netcluster cut hA hB        nothing passes between the two;   oneway hA hB: nothing passes from hA to hB
  netcluster loss hI PCT      lose so much of what comes in;    rate hI 200kbit: a slow link
  netcluster reject hI PORT   reset connections to a port;      blackhole hI SIZE: lose larger packets silently
  netcluster freeze hI        stop every process;               thaw hI: let them go on
  netcluster heal [hI]        take all network faults away
  netcluster skew hI SECONDS  move the wall clock (of what starts from now on; again: it jumps for that, too)
  netcluster monotonic hI SECONDS   boot the host anew with its monotonic clock so far ahead
  netcluster down             end everything, leave nothing

NETCLUSTER_NAME (default: main) tells clusters apart that exist side by side."""


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    name = os.environ.get("NETCLUSTER_NAME", "main")
    try:
        match words:
            case ["up", size]:
                cluster = Cluster.up(name, int(size), guarded=False)
                print(f"up: {', '.join(host.name for host in cluster)}; state in {cluster.folder}")
            case ["down"]:
                Cluster(name).down()
            case ["exec", host, *command] if command:
                line = Cluster.attach(name)[host].command(*command, cwd=os.getcwd())
                os.execvpe(line[0], line, Cluster.attach(name)[host].environment(os.environ))
            case ["ps"]:
                print(words_of(list(Cluster.attach(name))))
            case ["heal"]:
                Cluster.attach(name).heal()
            case ["cut" | "oneway" as verb, one, other]:
                cluster = Cluster.attach(name)
                (cluster.cut if verb == "cut" else cluster.one_way)(one, other)
            case [verb, host, *values] if verb in VERBS and len(values) == VERBS[verb][0]:
                VERBS[verb][1](Cluster.attach(name)[host], *values)
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except (BedError, ValueError) as error:
        print(f"netcluster: {error}", file=sys.stderr)
        return 1
    return 0


def _link(host: Host, how: str) -> None:
    if how not in ("up", "down"):
        raise BedError(f"link {host.name} {how}: up or down")
    host.link(how == "up")


def _monotonic(host: Host, seconds: str) -> None:
    if host.up:
        host.crash()
    host.boot(monotonic=int(seconds))


VERBS: dict[str, tuple[int, Callable[..., None]]] = {
    "crash": (0, Host.crash),
    "poweroff": (0, Host.power_off),
    "boot": (0, Host.boot),
    "freeze": (0, Host.freeze),
    "thaw": (0, Host.thaw),
    "heal": (0, Host.heal),
    "link": (1, _link),
    "loss": (1, lambda host, percent: host.loss(int(percent))),
    "reject": (1, lambda host, port: host.reject(int(port))),
    "blackhole": (1, lambda host, size: host.black_hole(int(size))),
    "rate": (1, Host.rate),
    "skew": (1, lambda host, seconds: host.skew(int(seconds))),
    "monotonic": (1, _monotonic),
}
"""Verb -> how many values follow the host, and what to do."""
