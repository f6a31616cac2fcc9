"""
Helpers of the readers: numbers, host lists, JSON, and adapters.

`TaskVariables` describes a launcher by the names of its variables for rank, size and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from pdrun.endpoint import parse_port
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters.model import AllocatedHost, LauncherInfo, LauncherKind, Probes
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts import nodelist
from pdrun.launcher.hosts.selection import check_host_name
from pdrun.quick_dataclass import dataclass

Environ = Mapping[str, str]
MAX_VALUE_CHARS = 1 << 20
"""Length limit of a value that is read as a list or as JSON."""


def read_number(environ: Environ, name: str, least: int = 0) -> int | None:
    """
    Return the whole number in a variable; None if it is not set.

    Raises:
        ConfigError: the value is not a number in plain digits, or is below ``least``.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"must be a whole number, got {quote_text(text)}", where=name)
    if int(text) < least:
        raise ConfigError(f"must be at least {least}, got {text}", where=name)
    return int(text)


def require_number(environ: Environ, name: str, marker: str, least: int = 0) -> int:
    """
    Return the number as `read_number` does; raise ConfigError if the variable is not set although
    ``marker`` is.
    """
    value = read_number(environ, name, least)
    if value is None:
        raise ConfigError(
            f"is not set, but {marker} is",
            where=name,
            hint="unset the launcher's other variables, or use --launcher none",
        )
    return value


def read_port(environ: Environ, name: str) -> int | None:
    """Return the TCP port in a variable, None if it is not set; ConfigError if it is invalid."""
    if name not in environ:
        return None
    try:
        return parse_port(environ[name], where=name)
    except UsageError as error:
        raise ConfigError(f"must be a port, got {quote_text(environ[name])}", where=name) from error


def check_below(rank: int | None, count: int | None, rank_name: str, count_name: str) -> None:
    """Raise ConfigError if a rank is not below its count."""
    if rank is not None and count is not None and rank >= count:
        raise ConfigError(f"must be below {count_name}={count}, got {rank}", where=rank_name)


def parse_host_names(names: Iterable[str], where: str) -> tuple[AllocatedHost, ...]:
    """
    Return the hosts without duplicates, with the number of times that each was listed.

    Raises:
        ConfigError: an entry is not a host name, or there are too many hosts.
    """
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        if len(counts) > nodelist.MAX_HOSTS:
            raise ConfigError(f"has more than {nodelist.MAX_HOSTS} hosts", where=where)
    try:
        return tuple(
            AllocatedHost(check_host_name(name, where), count) for name, count in counts.items()
        )
    except UsageError as error:
        raise ConfigError(error.what, where=where, hint=error.hint) from None


def read_host_list(environ: Environ, name: str) -> tuple[AllocatedHost, ...]:
    """Return the hosts of a compressed list in a variable; none if it is not set."""
    text = environ.get(name, "")
    try:
        return tuple(
            AllocatedHost(host.name)
            for host in parse_host_names(nodelist.expand_nodelist(text, name), name)
        )
    except UsageError as error:
        raise ConfigError(error.what, where=name, hint=error.hint) from None


def read_lines(path: str, variable: str, probes: Probes) -> list[str]:
    """
    Return the lines of the file that a variable names.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    try:
        text = probes.read_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{quote_text(path)} cannot be read: {reason}", where=variable) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{quote_text(path)} has no host", where=variable)
    return lines


def read_json(environ: Environ, name: str) -> Any:
    """Return the JSON value of a variable; ConfigError if it is not JSON or too long."""
    text = environ[name]
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigError(
            f"must have at most {MAX_VALUE_CHARS} characters, got {len(text)}", where=name
        )
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_small_int)
    except RecursionError:
        raise ConfigError("is nested too deeply", where=name) from None
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", where=name) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _parse_small_int(text: str) -> int:
    if len(text) > 18:
        raise ValueError("a number has too many digits")
    return int(text)


def find_own_host(hosts: tuple[AllocatedHost, ...], probes: Probes) -> int | None:
    """
    Return the index of this machine in the list, by name first, then by address. None: not found.
    """
    names = [host.name for host in hosts]
    if probes.hostname in names:
        return names.index(probes.hostname)
    short_name = probes.hostname.partition(".")[0]
    matches = [at for at, name in enumerate(names) if name.partition(".")[0] == short_name]
    if len(matches) == 1:
        return matches[0]
    for at, name in enumerate(names[:1024]):
        if probes.is_here(name):
            return at
    return None


@dataclass(frozen=True)
class LauncherAdapter:
    """How one launcher is recognised and read."""

    name: str
    title: str
    is_present: Callable[[Environ], bool]
    """Whether the launcher's variables are in an environment."""
    read: Callable[[Environ, Probes], LauncherInfo]
    """Read the variables. Raises ConfigError with the name of the variable."""
    why_stale: Callable[[Environ, Probes], str] = lambda environ, probes: ""
    """Why the variables do not belong to this process, or the empty string."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the launcher's variables, for reports."""

    def variables(self, environ: Environ) -> tuple[str, ...]:
        """Return the names of the launcher's variables that are set."""
        return tuple(sorted(name for name in environ if name.startswith(self.prefixes)))


def no_head(environ: Environ, probes: Probes) -> tuple[str, str]:
    """Default of ``find_head``: host and variable are unknown."""
    return "", ""


@dataclass(frozen=True)
class TaskVariables:
    """
    Names of the variables in which a launcher gives each task its numbers. Empty: no such variable.
    """

    name: str
    title: str
    markers: tuple[str, ...]
    """Variables that are set in its tasks, and only there."""
    rank: str
    world: str
    local_rank: str = ""
    local_size: str = ""
    node_rank: str = ""
    nodes: str = ""
    job: str = ""
    find_head: Callable[[Environ, Probes], tuple[str, str]] = no_head
    why_stale: Callable[[Environ, Probes], str] = lambda environ, probes: ""
    prefixes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    """Variables that are never set in its tasks."""
    is_alone_on_node: bool = False
    """Whether the launcher starts only one task per node."""
    kind: LauncherKind = field(default="task")

    def to_adapter(self) -> LauncherAdapter:
        """Return the adapter that reads these variables."""
        return LauncherAdapter(
            self.name, self.title, self.is_present, self.read, self.why_stale, self.prefixes
        )

    def is_present(self, environ: Environ) -> bool:
        """Return whether the markers are set."""
        has_markers = all(name in environ for name in self.markers)
        return has_markers and not any(name in environ for name in self.absent)

    def read(self, environ: Environ, probes: Probes) -> LauncherInfo:
        """Read the variables. With one task per node, ranks are node ranks."""
        marker = self.markers[0]
        rank = require_number(environ, self.rank, marker)
        world = None
        if self.world:
            world = require_number(environ, self.world, marker, 1)
        check_below(rank, world, self.rank, self.world)
        local_rank = read_number(environ, self.local_rank)
        local_size = read_number(environ, self.local_size, 1)
        check_below(local_rank, local_size, self.local_rank, self.local_size)
        head, head_source = self.find_head(environ, probes)
        sources = {
            "rank": self.rank,
            "world": self.world,
            "local_rank": self.local_rank,
            "local_size": self.local_size,
            "node_rank": self.node_rank,
            "nodes": self.nodes,
            "job_id": self.job,
            "head": head_source,
        }
        if self.is_alone_on_node:
            local_size = 1
        info = LauncherInfo(
            self.name,
            self.title,
            self.kind,
            rank,
            world,
            local_rank,
            local_size,
            read_number(environ, self.node_rank),
            read_number(environ, self.nodes, 1),
            head=head,
            job_id=environ.get(self.job, ""),
            sources={
                field: name
                for field, name in sources.items()
                if name and (field == "head" or name in environ)
            },
        )
        return infer_node_ranks(info)


def infer_node_ranks(found: LauncherInfo) -> LauncherInfo:
    """
    Use task ranks as node ranks if there is one task per node and the launcher has no node rank.
    """
    sources = dict(found.sources)
    if found.local_size is None and found.nodes is not None and found.nodes == found.world:
        found = replace(found, local_size=1)
        sources["local_size"] = f"{sources.get('nodes')} = {sources.get('world')}"
    if found.kind != "task" or found.local_size != 1 or found.rank is None:
        return found
    node_rank = found.node_rank
    nodes = found.nodes
    if node_rank is None:
        node_rank, sources["node_rank"] = found.rank, sources.get("rank", "")
    if nodes is None and found.world is not None:
        nodes, sources["nodes"] = found.world, sources.get("world", "")
    return replace(found, node_rank=node_rank, nodes=nodes, sources=sources)
