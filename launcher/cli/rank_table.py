"""
``pdrun rank-table``: make, check, merge, convert and show Ascend's rank tables.

The commands read files only; no device is asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from pdrun.errors import EXIT_CONFIG, EXIT_OK, ConfigError, PdrunError, UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers
from pdrun.launcher.common.files import read_text
from pdrun.launcher.hosts import hostfile as hostfiles
from pdrun.launcher.hosts import selection
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.ranktables import files, make, write
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.model import WRITABLE_DIALECTS, Fault, RankTable

HCCN_FILE = "/etc/hccn.conf"
"""Addresses of this machine's network cards, written by Ascend's driver."""
MAX_HCCN_BYTES = 1 << 20
MAX_FAULTS_SHOWN = 5
"""A fault of every rank is shown once, and the rest counted."""


def rank_table_group() -> click.Group:
    """Return ``pdrun rank-table``."""
    group = click.Group(
        "rank-table",
        help="Ascend's rank tables: make, check, merge, convert, show.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    commands = (
        _make_command(),
        _check_command(),
        _merge_command(),
        _convert_command(),
        _show_command(),
    )
    for command in commands:
        group.add_command(command)
    return group


def _out_option() -> click.Option:
    return click.Option(
        ["-o", "--out"],
        metavar="FILE",
        default="",
        help="Write to FILE, atomically; default: stdout.",
    )


def _files_argument() -> click.Argument:
    return click.Argument(["files"], nargs=-1, required=True, metavar="FILE...")


def _make_command() -> click.Command:
    return click.Command(
        "make",
        callback=make_table,
        help="Make a table of version 1.0: ranks in the order of hosts and devices.",
        params=[
            click.Option(
                ["--hosts"],
                metavar="LIST",
                default="",
                help="a,b or node[1-4]:8; default: this machine.",
            ),
            click.Option(["--hostfile"], metavar="FILE", default="", help="Hostfile, as for run."),
            click.Option(
                ["--devices"], metavar="N", help="Devices of each host that has no number."
            ),
            click.Option(
                ["--hccn"],
                metavar="[HOST=]FILE",
                multiple=True,
                help=(
                    "hccn.conf of a host, or the output of hccn_tool -i N -ip -g there; "
                    "repeat for each host."
                ),
            ),
            click.Option(
                ["--job"], metavar="JOB", default="", help="The nodes and workers of this job."
            ),
            _out_option(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _check_command() -> click.Command:
    return click.Command(
        "check",
        callback=check_tables,
        help="Print for each file whether a job can use it, and why not.",
        params=[_files_argument()],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _merge_command() -> click.Command:
    return click.Command(
        "merge",
        callback=merge_tables,
        help="Merge several tables into one; ranks are renumbered.",
        params=[_files_argument(), _out_option()],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _convert_command() -> click.Command:
    return click.Command(
        "convert",
        callback=convert_table,
        help="Convert a table to another dialect.",
        params=[
            click.Argument(["file"], metavar="FILE"),
            click.Option(
                ["--to"], metavar="DIALECT", required=True, help="1.0, 1.2, 2.0, group or lab."
            ),
            click.Option(
                ["--lossy"], is_flag=True, help="Drop what the new dialect does not support."
            ),
            _out_option(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _show_command() -> click.Command:
    return click.Command(
        "show",
        callback=show_table,
        help="Print a table: one line per rank.",
        params=[click.Argument(["file"], metavar="FILE")],
        context_settings=dict(CONTEXT_SETTINGS),
    )


# The work of each command. The parameters' names are those of click.
# --------------------------------------------------------------------------------------------------


def check_tables(files: Sequence[str]) -> int:
    """Print a verdict for each file; return 78 if one of them cannot be used."""
    code = EXIT_OK
    for path in files:
        if not _check_file(path):
            code = EXIT_CONFIG
    return code


def _check_file(path: str) -> bool:
    """Print the verdict of one file; return whether a job can use it."""
    try:
        loaded = files.load_table(path)
    except PdrunError as error:
        print(f"{path}: refused\n  {error}")
        return False
    is_good = not loaded.errors
    if is_good and loaded.table is not None:
        print(f"{path}: good: {_describe_table(loaded.table)}")
    else:
        print(f"{path}: refused")
    for line in _fault_lines(loaded, loaded.faults):
        print(f"  {line}")
    return is_good


def _fault_lines(loaded: files.LoadedTable, faults: Sequence[Fault]) -> list[str]:
    """Return the first faults as lines, and the number of the others."""
    lines = []
    for fault in faults[:MAX_FAULTS_SHOWN]:
        prefix = "warning: " if fault.is_warning else ""
        lines.append(prefix + loaded.format_fault(fault))
    if len(faults) > MAX_FAULTS_SHOWN:
        lines.append(f"... and {len(faults) - MAX_FAULTS_SHOWN} more")
    return lines


def _describe_table(table: RankTable) -> str:
    kind = f"the {table.dialect} dialect"
    if table.dialect[0].isdigit():
        kind = f"version {table.dialect}"
    pods = f", {len(table.super_pods)} super pod(s)" if table.super_pods else ""
    return f"{kind}, {len(table.devices)} rank(s) on {len(table.servers)} server(s){pods}"


def show_table(file: str) -> int:
    """Print a table, one line per rank."""
    table = _load_table(file, lenient=False)
    print(_describe_table(table))
    rows = [("rank", "server", "device", "address", "reached at")]
    for server in table.servers_by_rank:
        name = server.names[0] if server.names else ""
        address = server.first_text("container_ip", "pod_ip", "host_ip") or name or "-"
        for device in sorted(server.devices, key=lambda device: device.rank):
            rows.append(
                (
                    str(device.rank),
                    server.id or "-",
                    str(device.device_id),
                    ",".join(device.ips) or "-",
                    address,
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return EXIT_OK


def convert_table(file: str, to: str, out: str, lossy: bool) -> int:
    """Write a table in another dialect; numbers of the wrong JSON type are corrected."""
    dialect = parsers.choice_parser(*WRITABLE_DIALECTS)(to, "--to")
    table = _load_table(file, lenient=True)
    converted, lost = write.convert_table(table, dialect)
    if lost and not lossy:
        raise UsageError(
            f"{Path(file).name}: dialect {dialect} does not support {', '.join(lost[:8])}",
            where="--to",
            hint="add --lossy to leave it out",
        )
    for what in lost:
        print(f"pdrun: warning: left out: {what}", file=sys.stderr)
    if dialect == "2.0" and table.dialect != "2.0":
        print(
            'pdrun: warning: ports of links are not in the older dialects: fill in "ports"',
            file=sys.stderr,
        )
    return _write_table(converted, out)


def merge_tables(files: Sequence[str], out: str) -> int:
    """Write one table with the servers of several."""
    tables = [(Path(path).name, _load_table(path, lenient=True)) for path in files]
    return _write_table(make.merge_tables(tables), out)


def make_table(
    hosts: str,
    hostfile: str,
    devices: str | None,
    hccn: Iterable[str],
    job: str,
    out: str,
) -> int:
    """Write a new table of hosts, their devices and the addresses of their network cards."""
    found = _find_hosts(hosts, hostfile, job)
    count = None
    if devices is not None:
        count = int(parsers.int_parser(1, selection.MAX_DEVICES)(devices, "--devices"))
    return _write_table(make.make_table(found, _read_addresses(hccn, found), count), out)


def _find_hosts(hosts: str, hostfile: str, job: str) -> tuple[Host, ...]:
    """Return the hosts that the options name; without any, this machine."""
    if len([True for given in (hosts, hostfile, job) if given]) > 1:
        raise UsageError("--hosts, --hostfile and --job exclude each other", hint="use one of them")
    if hosts:
        return selection.parse_hosts(hosts, "--hosts")
    if hostfile:
        return hostfiles.read_hostfile(hostfile, sys.stdin.buffer.read)
    if job:
        return _hosts_of_job(job)
    return (Host(os.uname().nodename, where="this machine"),)


def _read_addresses(hccn: Iterable[str], hosts: Sequence[Host]) -> dict[str, Mapping[int, str]]:
    """
    Return host -> device -> address, from the files of ``--hccn [HOST=]FILE``.

    Without the option, the file of this machine is read if the table has one host.
    """
    addresses: dict[str, Mapping[int, str]] = {}
    names = {host.name for host in hosts}
    for text in hccn:
        host, equals, path = text.rpartition("=")
        if not equals and len(hosts) > 1:
            raise UsageError(f"must be HOST=FILE, got {text!r}", where="--hccn")
        name = host if equals else hosts[0].name
        if name not in names:
            raise UsageError(f"{name} is not in the list of hosts", where="--hccn")
        if name in addresses:
            raise UsageError(f"{name} is given twice", where="--hccn")
        addresses[name] = make.parse_addresses(read_text(path, MAX_HCCN_BYTES), Path(path).name)
    if not addresses and len(hosts) == 1 and Path(HCCN_FILE).is_file():
        text = read_text(HCCN_FILE, MAX_HCCN_BYTES)
        addresses[hosts[0].name] = make.parse_addresses(text, HCCN_FILE)
    return addresses


def _hosts_of_job(job: str) -> tuple[Host, ...]:
    """Return the hosts of a job of this user, in rank order; devices: one per worker."""
    from pdrun.launcher.jobs.status import list_statuses

    status = list_statuses(job)[0]
    nodes = sorted(
        (node.index, name, node.workers) for name, node in status.nodes.items() if node.index >= 0
    )
    if not nodes:
        raise ConfigError(
            "has no nodes yet", where=job, hint="wait until the job runs: pdrun status"
        )
    return tuple(
        Host(selection.check_host_name(name, job), workers, where=f"job {job}")
        for _, name, workers in nodes
    )


def _load_table(path: str, *, lenient: bool) -> RankTable:
    """Return a valid table, or raise its first fault. Warnings go to stderr."""
    loaded = files.load_table(path, lenient=lenient)
    if loaded.errors or loaded.table is None:
        raise loaded.make_error(loaded.errors[0])
    for line in _fault_lines(loaded, loaded.warnings):
        print(f"pdrun: {line}", file=sys.stderr)
    return loaded.table


def _write_table(table: RankTable, out: str) -> int:
    """Check a table and write it to a file, or to stdout."""
    for fault in check_table(table):
        if not fault.is_warning:
            raise ConfigError(f"the table would be invalid: {fault.what}", hint=fault.hint)
    text = write.format_table(table)
    if out in ("", "-"):
        sys.stdout.write(text)
    else:
        files.write_file(out, text)
        print(f"{out}: {_describe_table(table)}", file=sys.stderr)
    return EXIT_OK
