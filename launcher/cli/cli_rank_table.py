"""
``pdrun rank-table``: make, check, merge, convert and show Ascend's rank tables. No device is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pdrun.errors import EXIT_CONFIG, EXIT_OK, ConfigError, PdrunError, UsageError
from pdrun.launcher.common import parsers
from pdrun.launcher.common.textfile import read_text
from pdrun.launcher.hosts import hostfile
from pdrun.launcher.hosts import selection as hosts
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.ranktables import files, make, write
from pdrun.launcher.ranktables.check import check
from pdrun.launcher.ranktables.model import WRITTEN, Fault, RankTable

HCCN = "/etc/hccn.conf"
_LIMIT = 1 << 20


def check_files(paths: Sequence[str]) -> int:
    """Print a verdict for each file; 78 where one of them cannot be used."""
    worst = EXIT_OK
    for path in paths:
        try:
            loaded = files.load(path)
        except PdrunError as error:
            print(f"{path}: refused\n  {error}")
            worst = EXIT_CONFIG
            continue
        wrong = loaded.wrong
        print(
            f"{path}: "
            + ("refused" if wrong or loaded.table is None else f"good: {_summary(loaded.table)}")
        )
        for line in _some(loaded, loaded.faults):
            print(f"  {line}")
        worst = EXIT_CONFIG if wrong else worst
    return worst


_MOST = 5


def _some(loaded: files.Loaded, faults: Sequence[Fault]) -> list[str]:
    """
    Return the first faults as lines, and how many more there are: a fault of every rank is one that
    is seen once.
    """
    lines = [("warning: " if fault.mild else "") + loaded.line(fault) for fault in faults[:_MOST]]
    if len(faults) > _MOST:
        return [*lines, f"... and {len(faults) - _MOST} more"]
    return lines


def _summary(table: RankTable) -> str:
    count = len(table.servers)
    devices = len(table.devices)
    pods = f", {len(table.super_pods)} super pod(s)" if table.super_pods else ""
    kind = (
        f"version {table.dialect}" if table.dialect[0].isdigit() else f"the {table.dialect} dialect"
    )
    return f"{kind}, {devices} rank(s) on {count} server(s){pods}"


def show(path: str) -> int:
    """Print a table as one: a rank a line."""
    table = _load(path, lenient=False)
    print(_summary(table))
    rows = [("rank", "server", "device", "address", "reached at")]
    for server in table.ordered:
        reach = reached(
            server.names[0] if server.names else "",
            server.named("container_ip", "pod_ip", "host_ip"),
        )
        rows += [
            (str(one.rank), server.id or "-", str(one.device_id), ",".join(one.ips) or "-", reach)
            for one in sorted(server.devices, key=lambda one: one.rank)
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return EXIT_OK


def reached(name: str, address: str) -> str:
    """Return what other nodes call a server."""
    return address or name or "-"


def convert(path: str, dialect: str, out: str, *, lossy: bool) -> int:
    """Write a table in another dialect; numbers of the wrong JSON type are set right on the way."""
    wanted = parsers.choice(*WRITTEN)(dialect, "--to")
    table = _load(path, lenient=True)
    made, lost = write.convert(table, wanted)
    if lost and not lossy:
        raise UsageError(
            f"{Path(path).name}: dialect {wanted} has no place for {', '.join(lost[:8])}",
            where="--to",
            hint="add --lossy to leave it out",
        )
    for what in lost:
        print(f"pdrun: warning: left out: {what}", file=sys.stderr)
    if wanted == "2.0" and table.dialect != "2.0":
        print(
            'pdrun: warning: ports of links are not in the older dialects: fill in "ports"',
            file=sys.stderr,
        )
    return _put(made, out)


def merge(paths: Sequence[str], out: str) -> int:
    """Write one table of several."""
    return _put(make.merge([(Path(path).name, _load(path, lenient=True)) for path in paths]), out)


def create(
    listed: str,
    file: str,
    devices: str | None,
    cards: Iterable[str],
    job: str,
    out: str,
    hostname: str,
) -> int:
    """Write a new table, from hosts, their devices and the addresses of their network cards."""
    if len([True for given in (listed, file, job) if given]) > 1:
        raise UsageError(
            "--hosts, --hostfile and --job each give the hosts", hint="use one of them"
        )
    if listed:
        found = hosts.parse_hosts(listed, "--hosts")
    elif file:
        found = hostfile.read_hostfile(file, sys.stdin.buffer.read)
    elif job:
        found = _of_job(job)
    else:
        found = (Host(hostname, where="this machine"),)
    count = (
        int(parsers.whole(1, hosts.MOST_DEVICES)(devices, "--devices"))
        if devices is not None
        else None
    )
    return _put(make.make(found, _cards(cards, found), count), out)


def _cards(given: Iterable[str], found: Sequence[Host]) -> dict[str, Mapping[int, str]]:
    """
    Return host -> device -> address of ``--hccn [HOST=]FILE``; without any, of this machine's own
    file.
    """
    cards: dict[str, Mapping[int, str]] = {}
    for word in given:
        host, equals, path = word.rpartition("=")
        if not equals and len(found) > 1:
            raise UsageError(
                f"{word!r} does not say whose addresses these are",
                where="--hccn",
                hint="write HOST=FILE",
            )
        name = host if equals else found[0].name
        if name not in {one.name for one in found}:
            raise UsageError(f"{name} is none of the hosts", where="--hccn")
        if name in cards:
            raise UsageError(f"{name} is given twice", where="--hccn")
        cards[name] = make.addresses(read_text(path, _LIMIT), Path(path).name)
    if not cards and len(found) == 1 and Path(HCCN).is_file():
        cards[found[0].name] = make.addresses(read_text(HCCN, _LIMIT), HCCN)
    return cards


def _of_job(job: str) -> tuple[Host, ...]:
    """
    Return the hosts of a job that this user's list knows, in rank order, with as many devices as
    workers.
    """
    from pdrun.launcher.jobs import status as job_status

    status = job_status.list_statuses(job)[0]
    nodes = sorted(
        (node.index, name, node.workers) for name, node in status.nodes.items() if node.index >= 0
    )
    if not nodes:
        raise ConfigError("has no nodes yet", where=job, hint="wait until it runs: pdrun status")
    return tuple(
        Host(hosts.host_name(name, job), workers, where=f"job {job}") for _, name, workers in nodes
    )


def _load(path: str, *, lenient: bool) -> RankTable:
    """Return a table that is good, or raise what is wrong with it; warnings go to stderr."""
    loaded = files.load(path, lenient=lenient)
    if loaded.wrong or loaded.table is None:
        raise loaded.error(loaded.wrong[0])
    for line in _some(loaded, loaded.mild):
        print(f"pdrun: {line}", file=sys.stderr)
    return loaded.table


def _put(table: RankTable, out: str) -> int:
    """Write a table that has passed its own check."""
    faults = [fault for fault in check(table) if not fault.mild]
    if faults:
        raise ConfigError(f"would be no good: {faults[0].what}", hint=faults[0].hint)
    text = write.text_of(table)
    if out in ("", "-"):
        sys.stdout.write(text)
    else:
        files.write(out, text)
        print(f"{out}: {_summary(table)}", file=sys.stderr)
    return EXIT_OK
