"""
Host files, in all common grammars, line by line; a file may mix them.

    node1 slots=8 max_slots=8   Open MPI, DeepSpeed, Horovod; blanks around = are allowed; also cpu,
                                cpus, count, gpus
    node[01-16,20]:8            HOST:N of MPICH and Intel MPI, with Slurm's ranges; several lines of
                                a host add up; binding= is accepted, see --bind
    node1 4 node2 8             pairs of LSF
    node1 4 all.q@node1 UNDEFINED
                                PE_HOSTFILE of SGE; several queues of a host add up
    node1                       one slot per line if a host has several lines (PBS_NODEFILE), else
                                all its devices
    rank 0=node1 slot=0-3       the host part of a rankfile: ranks are counted per host, and pdrun
                                numbers them host by host
    ^node3                      removes a host (PRRTE)
    user@node4 devices=0,2 port=2222 addr=10.0.0.4
                                devices, the port of ssh, the address for the other hosts

Comments are ``#``, ``//`` and ``/* */``. Slots count workers. The order of the file is the order of
the node ranks. A missing or empty file, and one that leaves no host, is an error: pdrun never runs
the job on this machine instead.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdrun.errors import ConfigError, UsageError, did_you_mean
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.common.files import decode_text, read_text
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts import nodelist, selection
from pdrun.launcher.hosts.selection import Host

MAX_FILE_BYTES = 8 << 20
MAX_LINE_CHARACTERS = 1 << 16
MAX_ERRORS = 20
_COUNT_KEYS = ("slots", "cpu", "cpus", "count", "gpus")
_MAX_COUNT_KEYS = ("max_slots", "max-slots", "slots-max", "slots_max")
_KEYS = (
    *_COUNT_KEYS,
    *_MAX_COUNT_KEYS,
    *("devices", "port", "user", "username", "addr", "binding"),
)


def read_hostfile(path: str, stdin: Callable[[int], bytes] | None = None) -> tuple[Host, ...]:
    """
    Return the hosts of a file; ``-`` is standard input, read with ``stdin(limit)``.

    Raises:
        UsageError: there is no such file, or it is not a regular file.
        ConfigError: the first mistake, with ``file:line``, and the lines of the next ones.
    """
    if path == "-" and stdin is not None:
        name = "standard input"
        text = decode_text(stdin(MAX_FILE_BYTES + 1), name, MAX_FILE_BYTES)
    else:
        name = Path(path).name
        hint = "give it on standard input: --hostfile -"
        text = read_text(path, MAX_FILE_BYTES, pipe_hint=hint)
    return parse_hostfile(text, name)


@dataclass
class HostEntry:
    """One host, from all its lines."""

    host: Host
    line_count: int = 0
    """Its lines without a count."""
    count_where: str = ""
    """The line with its count; empty: no such line."""
    adds_up: bool = False
    """Whether lines with a count are added: in the grammars of MPICH and SGE."""


@dataclass
class HostfileState:
    """What was parsed so far."""

    entries: dict[str, HostEntry] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rank of a rankfile -> (host, where)."""


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """Return the hosts of a file's text; errors as in `read_hostfile`."""
    _check_is_host_list(text, name)
    state = HostfileState()
    errors = []
    for number, line in _content_lines(text, name):
        where = f"{name}:{number}"
        try:
            _parse_line(line, where, state)
        except UsageError as error:
            errors.append(error)
            if len(errors) > MAX_ERRORS:
                break
    if not errors:
        try:
            return _collect_hosts(state, name)
        except UsageError as error:
            errors.append(error)
    first = errors[0]
    hint = first.hint
    if len(errors) > 1:
        more = "also wrong: " + ", ".join(error.where for error in errors[1:6])
        hint = f"{hint}; {more}" if hint else more
    raise ConfigError(first.what, where=first.where, hint=hint)


def _check_is_host_list(text: str, name: str) -> None:
    """Refuse other kinds of files that name hosts, which would read as odd host names."""
    start = text.lstrip("\ufeff \t\r\n")
    line = text[: len(text) - len(start)].count("\n") + 1
    where = f"{name}:{line}"
    if re.match(r"""\{|\[\s*["'{]""", start):
        raise ConfigError("looks like JSON", where=where, hint="write one host per line")
    if start.startswith(("---\n", "- ")):
        raise ConfigError("looks like YAML", where=where, hint="write one host per line")
    if match := re.match(r"\[[A-Za-z][\w:. -]*\]", start):
        raise ConfigError(
            f"{match[0]} is a heading of an inventory (Ansible)",
            where=where,
            hint="write one host per line, without headings",
        )


def _content_lines(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines with content, without comments."""
    in_comment = False
    number = 0
    for number, raw in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if len(raw) > MAX_LINE_CHARACTERS:
            raise ConfigError(
                f"a line of {len(raw)} characters is too long", where=f"{name}:{number}"
            )
        line = raw
        if in_comment:
            _, closed, line = line.partition("*/")
            if not closed:
                continue
            in_comment = False
        if match := re.match(r"\s*[a-z]+://(?:([^@/\s]+)@)?([^:/\s]+)(?::([0-9]+))?", line):
            user = f" user={match[1]}" if match[1] else ""
            port = f" port={match[3]}" if match[3] else ""
            raise ConfigError(
                "is a URL", where=f"{name}:{number}", hint=f"write {match[2]}{port}{user}"
            )
        line = re.sub(r"/\*.*?\*/", " ", line)
        line = re.split(r"#|//", line, maxsplit=1)[0]
        head, opened, _ = line.partition("/*")
        in_comment = bool(opened)
        if head.strip():
            yield number, head.strip()
    if in_comment:
        raise ConfigError("a comment /* is not closed", where=f"{name}:{number}")


def _parse_line(line: str, where: str, state: HostfileState) -> None:
    """Parse one line into ``state``."""
    if match := re.fullmatch(r"rank\s+([0-9]{1,7})\s*=\s*(\S+)(?:\s+slots?\s*=\s*\S+)?", line):
        return _add_rank(int(match[1]), match[2], where, state)
    if match := re.fullmatch(r"\^\s*(\S+)", line):
        for host in selection.parse_host_item(match[1], where):
            state.removed[host.name] = where
        return None
    if line.startswith("+"):
        raise UsageError(
            f"{quote_text(line)}: relative names are not supported",
            where=where,
            hint="write the hosts' names",
        )
    _check_no_address_line(line, where)
    if line.startswith("-"):
        selection.check_host_name(line.split()[0], where)
    words = re.sub(r"\s*=\s*", "=", line).split()
    plain = [word for word in words if "=" not in word]
    if len(plain) > 1 and re.fullmatch("[0-9]+", plain[1]):
        return _parse_pairs(words, plain, where, state)
    if len(plain) > 1 and plain != words[: len(plain)]:
        raise UsageError(f"{quote_text(plain[-1])} must be before key=value", where=where)
    settings = _parse_settings([word for word in words if "=" in word], where)
    for word in plain:
        for host in selection.parse_host_item(word, where):
            adds_up = host.devices is not None
            _add_host(_apply_settings(host, settings, where), where, state, adds_up=adds_up)
    if not plain:
        raise UsageError(f"{quote_text(line)} names no host", where=where)
    return None


def _parse_pairs(words: list[str], plain: list[str], where: str, state: HostfileState) -> None:
    """LSF's ``h n h n``, or SGE's ``h n queue cores``."""
    if plain != words:
        raise UsageError("a count after the name and key=value exclude each other", where=where)
    is_queue_line = len(words) == 4 and not words[3].isdigit()
    if is_queue_line:
        words = words[:2]
    if len(words) % 2:
        raise UsageError(
            f"{quote_text(words[-1])} is not followed by a number",
            where=where,
            hint="write HOST N HOST N",
        )
    for name, count in zip(words[::2], words[1::2], strict=True):
        _add_host(
            Host(
                selection.check_host_name(name, where),
                selection.parse_device_count(count, where),
                None,
                where,
            ),
            where,
            state,
            adds_up=is_queue_line,
        )


def _check_no_address_line(line: str, where: str) -> None:
    """
    Refuse a line of /etc/hosts, an address and the names of one host: it is no list of hosts.
    """
    address, *names = line.split()
    if not names or any(re.search(r"[=:@\[]|^[0-9]+$", name) for name in names):
        return
    try:
        ipaddress.ip_address(address)
        ipaddress.ip_address(names[0])
    except ValueError:
        if re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:.%]*:[0-9A-Za-z:.%]*", address):
            raise UsageError(
                f"{quote_text(line)} looks like a line of /etc/hosts",
                where=where,
                hint=f"write {names[0]}, or {names[0]} addr={address}",
            ) from None


def _parse_settings(words: list[str], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f"known: {', '.join(_KEYS)}"
            raise UsageError(f"unknown key {quote_text(key)}", where=where, hint=hint)
        name = key
        if key in _COUNT_KEYS:
            name = "slots"
        elif key in _MAX_COUNT_KEYS:
            name = "max_slots"
        elif key == "username":
            name = "user"
        if name in found:
            raise UsageError(f"{name} is given twice", where=where)
        found[name] = value
    return found


def _apply_settings(host: Host, settings: dict[str, str], where: str) -> Host:
    """Return the host with the settings of its line."""
    if not settings:
        return host
    count = host.devices
    if "slots" in settings:
        if count is not None:
            raise UsageError(
                f"{host.name}:{count} and slots= both count", where=where, hint="write one of them"
            )
        count = selection.parse_device_count(settings["slots"], where, least=0)
    if "max_slots" in settings and (count or 0) > selection.parse_device_count(
        settings["max_slots"], where
    ):
        raise UsageError(
            f"slots={count} is more than max_slots={settings['max_slots']}", where=where
        )
    indices = None
    if "devices" in settings:
        indices = rank_lists.parse_rank_list(settings["devices"], where)
        if len(indices) > selection.MAX_DEVICES or (count is not None and count != len(indices)):
            raise UsageError(
                f"slots={count} and devices={settings['devices']} differ in number", where=where
            )
        count = len(indices)
    address = ""
    if "addr" in settings:
        address = selection.check_host_name(settings["addr"], where)
    user = settings.get("user", host.user)
    if user and not selection.USER_NAME.fullmatch(user):
        raise UsageError(f"{quote_text(user)} is not a valid user name", where=where)
    port = None
    if "port" in settings:
        port = parsers.parse_tcp_port(settings["port"], where)
    return replace(host, devices=count, indices=indices, address=address, user=user, port=port)


def _add_host(host: Host, where: str, state: HostfileState, *, adds_up: bool = False) -> None:
    """
    Add a line of a host.

    Lines without a count are counted. A count allows no other line, unless the counts of the
    grammar add up.
    """
    entry = state.entries.setdefault(host.name, HostEntry(host, adds_up=adds_up))
    if entry.count_where and entry.adds_up and adds_up and _is_same_line(entry.host, host):
        devices = (entry.host.devices or 0) + (host.devices or 0)
        if devices > selection.MAX_DEVICES:
            raise UsageError(f"{host.name} has {devices} devices in total", where=where)
        entry.host = replace(entry.host, devices=devices)
        return
    if len(state.entries) > nodelist.MAX_HOSTS:
        raise UsageError(f"more than {nodelist.MAX_HOSTS} hosts", where=where)
    if host.devices is None:
        entry.line_count += 1
    if entry.count_where or (entry.line_count and host.devices is not None):
        before = entry.count_where or entry.host.where
        raise UsageError(
            f"{host.name} has a line already ({before})",
            where=where,
            hint="write it once with slots=N, or one line per slot without a number",
        )
    if host.devices is not None:
        entry.count_where = where


def _is_same_line(one: Host, other: Host) -> bool:
    """Whether two lines of a host differ at most in their counts."""
    return one.indices is None and replace(other, devices=one.devices, where=one.where) == one


def _add_rank(rank: int, name: str, where: str, state: HostfileState) -> None:
    if rank in state.ranks:
        raise UsageError(
            f"rank {rank} is listed twice (first in {state.ranks[rank][1]})", where=where
        )
    state.ranks[rank] = selection.check_host_name(name, where), where


def _collect_hosts(state: HostfileState, name: str) -> tuple[Host, ...]:
    found = _rank_hosts(state, name) if state.ranks else _list_hosts(state)
    left = tuple(host for host in found if host.name not in state.removed and host.devices != 0)
    known = {host.name for host in found}
    for gone, where in state.removed.items():
        if gone not in known:
            raise UsageError(f"^{gone} removes a host that is not listed", where=where)
    selection.check_addresses(left)
    if not left:
        what = "leaves no host" if found else "names no host"
        raise UsageError(what, where=name, hint="write one host per line")
    return left


def _list_hosts(state: HostfileState) -> tuple[Host, ...]:
    """
    Return the hosts of lines without ranks.

    If any host has several lines, each line of every host is one slot.
    """
    lines_are_slots = any(entry.line_count > 1 for entry in state.entries.values())
    hosts = []
    for entry in state.entries.values():
        host = entry.host
        if lines_are_slots and entry.line_count:
            host = replace(host, devices=entry.line_count)
        hosts.append(host)
    return tuple(hosts)


def _rank_hosts(state: HostfileState, name: str) -> tuple[Host, ...]:
    """
    Return the hosts of a rankfile with ranks 0 to n-1, in the order of their first ranks.

    A rankfile may place the ranks in turn on the hosts. The ranks of a job are host by host.
    """
    if state.entries:
        where = next(iter(state.entries.values())).host.where
        raise UsageError("a host without a rank among lines with ranks", where=where)
    found: dict[str, Host] = {}
    for expected, rank in enumerate(sorted(state.ranks)):
        host, where = state.ranks[rank]
        if rank != expected:
            raise UsageError(f"rank {expected} is missing", where=where)
        if host in found:
            found[host] = replace(found[host], devices=(found[host].devices or 0) + 1)
        else:
            found[host] = Host(host, 1, None, where)
    return tuple(found.values())
