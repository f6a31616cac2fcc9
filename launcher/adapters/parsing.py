"""
What every reader of environments needs: numbers in plain digits, lists of hosts, and one row of
names for launchers that tell each task its place in the same six variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters.model import LauncherInfo, AllocatedHost, LauncherKind, Probes
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.hosts import nodelist
from pdrun.launcher.hosts.selection import check_host_name

Environ = Mapping[str, str]
MAX_VALUE_CHARS = 1 << 20
"""Characters of a value that is read as a list or as JSON, at most."""


def read_number(environ: Environ, name: str, least: int = 0) -> int | None:
    """
    Return the whole number that a variable holds; None where it is not set.

    Raises:
        ConfigError: it is empty, no number in plain digits, or below ``least``.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{quote_text(text)} is not a whole number", where=name)
    if int(text) < least:
        raise ConfigError(f"{text} is below {least}", where=name)
    return int(text)


def require_number(environ: Environ, name: str, marker: str, least: int = 0) -> int:
    """
    As `number`; ConfigError where it is not set although ``marker`` is: a launcher's words are half
    there.
    """
    value = read_number(environ, name, least)
    if value is None:
        raise ConfigError(
            f"is not set, though {marker} is",
            where=name,
            hint="unset the rest too, or say --launcher none",
        )
    return value


def check_below(rank: int | None, count: int | None, rank_name: str, count_name: str) -> None:
    """Raise ConfigError where a rank is not below its count."""
    if rank is not None and count is not None and rank >= count:
        raise ConfigError(f"{rank} is not below {count_name}={count}", where=rank_name)


def parse_host_names(names: Iterable[str], where: str) -> tuple[AllocatedHost, ...]:
    """
    Return hosts, each once, with how often each was named; ConfigError for what is no host name.
    """
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        if len(counts) > nodelist.MAX_HOSTS:
            raise ConfigError(f"names more than {nodelist.MAX_HOSTS} hosts", where=where)
    try:
        return tuple(AllocatedHost(check_host_name(name, where), count) for name, count in counts.items())
    except UsageError as error:
        raise ConfigError(error.what, where=where, hint=error.hint) from None


def read_host_list(environ: Environ, name: str) -> tuple[AllocatedHost, ...]:
    """Return the hosts of a compressed list in a variable; none where it is not set."""
    text = environ.get(name, "")
    try:
        return tuple(
            AllocatedHost(host.name) for host in parse_host_names(nodelist.expand_nodelist(text, name), name)
        )
    except UsageError as error:
        raise ConfigError(error.what, where=name, hint=error.hint) from None


def read_lines(path: str, variable: str, probes: Probes) -> list[str]:
    """
    Return the lines of the file that a variable names; ConfigError where it cannot be read or says
    nothing.
    """
    try:
        text = probes.read_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{quote_text(path)} cannot be read: {reason}", where=variable) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{quote_text(path)} names no host", where=variable)
    return lines


def read_json(environ: Environ, name: str) -> Any:
    """Return what a variable holds as JSON; ConfigError where it is none or too long."""
    text = environ[name]
    if len(text) > MAX_VALUE_CHARS:
        raise ConfigError(f"{len(text)} characters are too many", where=name)
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_small_int)
    except (ValueError, RecursionError) as error:
        reason = (
            "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        )
        raise ConfigError(reason, where=name) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _parse_small_int(text: str) -> int:
    if len(text) > 18:
        raise ValueError("a number of too many digits")
    return int(text)


def find_own_host(hosts: tuple[AllocatedHost, ...], probes: Probes) -> int | None:
    """
    Return this machine's place among the hosts: by name first, then by address; None: it is none of
    them.
    """
    names = [host.name for host in hosts]
    if probes.hostname in names:
        return names.index(probes.hostname)
    short = [
        at
        for at, name in enumerate(names)
        if name.partition(".")[0] == probes.hostname.partition(".")[0]
    ]
    if len(short) == 1:
        return short[0]
    return next((at for at, name in enumerate(names[:1024]) if probes.is_here(name)), None)


@dataclass(frozen=True)
class LauncherAdapter:
    """One launcher: how it is recognised and read."""

    name: str
    title: str
    is_present: Callable[[Environ], bool]
    """Whether its own words are in an environment."""
    read: Callable[[Environ, Probes], LauncherInfo]
    """What they say; raises ConfigError naming a variable."""
    why_stale: Callable[[Environ, Probes], str] = lambda environ, probes: ""
    """Why they cannot be about this process, or the empty string."""
    prefixes: tuple[str, ...] = ()
    """How its variables begin, for reports."""

    def variables(self, environ: Environ) -> tuple[str, ...]:
        """Return the names of its variables that are set."""
        return tuple(sorted(name for name in environ if name.startswith(self.prefixes)))


def no_head(environ: Environ, probes: Probes) -> tuple[str, str]:
    """The default of a row's ``head``: (host, variable) unknown."""
    return "", ""


@dataclass(frozen=True)
class TaskVariables:
    """
    A launcher that gives each task its numbers in variables of its own: their names. Empty: it has
    none.
    """

    name: str
    title: str
    markers: tuple[str, ...]
    """All of them are set in its tasks, and nowhere else."""
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
    """Variables of which none is set in its tasks."""
    is_alone_on_node: bool = False
    """Its tasks are never several on one node."""
    kind: LauncherKind = field(default="task")

    def to_adapter(self) -> LauncherAdapter:
        """Return the row as a launcher."""
        return LauncherAdapter(self.name, self.title, self.is_present, self.read, self.why_stale, self.prefixes)

    def is_present(self, environ: Environ) -> bool:
        """Return whether its markers are set."""
        return all(name in environ for name in self.markers) and not any(
            name in environ for name in self.absent
        )

    def read(self, environ: Environ, probes: Probes) -> LauncherInfo:
        """Return what its variables say; where tasks stand one a node, ranks are node ranks."""
        marker = self.markers[0]
        rank = require_number(environ, self.rank, marker)
        world = require_number(environ, self.world, marker, 1) if self.world else None
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
        found = LauncherInfo(
            self.name,
            self.title,
            self.kind,
            rank,
            world,
            local_rank,
            1 if self.is_alone_on_node else local_size,
            read_number(environ, self.node_rank),
            read_number(environ, self.nodes, 1),
            head=head,
            job_id=environ.get(self.job, ""),
            sources={
                key: name
                for key, name in sources.items()
                if name and (key == "head" or name in environ)
            },
        )
        return infer_node_ranks(found)


def infer_node_ranks(found: LauncherInfo) -> LauncherInfo:
    """
    Return what tasks that stand one a node imply: their ranks count nodes, where the launcher has
    no better word.
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
