"""
Lines of an event log that are superseded by later ones: unread until their effect is needed.

Of the progress of a job, the states of a node and the exits of a rank only the last line counts.
A large log has a million lines, so most of them are not even split here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

MAX_WARNINGS = 1000
"""Warnings that a status keeps: the newest ones."""
_PREFIX = b'{"kind": "'
_HEAD_BYTES = len(_PREFIX) + 4
"""Start of a line that tells the kinds of events apart."""
_JOINED = _PREFIX + b"joined"
_PROGRESS = b"\n" + _PREFIX + b"progress"
_USAGE = b"\n" + _PREFIX + b"usage"
_UNREAD = re.compile(rb'\n(?!\{"kind": "(?:prog|susp|reco|exit|refu|usag))')
"""Ends where a line begins that is not one of the frequent kinds, which are deferred unread."""
_NODES_OR_EXITS = re.compile(rb'\n\{"kind": "(?:susp|reco|join|lost|left|stan|exit)')
_EXITS = re.compile(rb'\n\{"kind": "exit')


def _find_heads(*kinds: str) -> frozenset[bytes]:
    return frozenset(_PREFIX + kind[:4].encode() for kind in kinds)


_MEMBER_HEADS = _find_heads("joined", "lost", "left", "standby")
_NODE_HEADS = _MEMBER_HEADS | _find_heads("suspect", "recovered")
_EXIT_HEADS = _find_heads("exited")
_TEXT_HEADS = _find_heads("warning", "hang")


class LogBlock(NamedTuple):
    """Lines of a log: each one between ``start`` and ``end`` has a line end before it."""

    data: bytes
    start: int
    end: int

    def split_lines(self) -> list[bytes]:
        """Return the lines."""
        return self.data[self.start + 1 : self.end].split(b"\n")


class DeferredLines:
    """Lines between two others that change single nodes and ranks, the progress and warnings."""

    def __init__(self) -> None:
        self._blocks: list[LogBlock] = []
        self._members: list[bytes] = []
        """Lines with which a node may appear for the first time."""
        self._texts: deque[bytes] = deque(maxlen=MAX_WARNINGS)
        self._has_nodes = self._has_exits = True

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add_lines(self, block: bytes, start: int) -> tuple[int, int]:
        """
        Add lines of a block, up to one that cannot be deferred.

        Args:
            block: lines, each with a line end before it.
            start: index of the first one.

        Returns:
            the first and last index of the line that cannot be deferred; two equal ones: there is
            none.
        """
        for match in _UNREAD.finditer(block, start):
            first = match.end()
            head = block[first : first + _HEAD_BYTES]
            is_member = head in _MEMBER_HEADS
            end = block.find(b"\n", first)
            if end < 0:
                end = len(block)
            if is_member:
                self._members.append(block[first:end])
            elif head in _TEXT_HEADS:
                self._texts.append(block[first:end])
            else:
                self._add_block(block, start, first - 1)
                return first, end
        self._add_block(block, start, len(block))
        return len(block), len(block)

    def _add_block(self, block: bytes, start: int, end: int) -> None:
        if end > start:
            self._blocks.append(LogBlock(block, start, end))

    def drop_exits(self) -> None:
        """Forget the exits: a new generation begins."""
        self._has_exits = False

    def drop_nodes(self) -> None:
        """Forget the states of nodes: later lines set them."""
        self._has_nodes = False

    def member_names(self) -> set[bytes]:
        """Return the names of the nodes that may appear for the first time in these lines."""
        return set(_find_names(self._members))

    def all_lines(self) -> list[bytes]:
        """Return all lines, in order."""
        return [line for block in self._blocks for line in block.split_lines()]

    def last_lines(
        self, superseded: Collection[bytes] = (), known: Iterable[bytes] = ()
    ) -> list[bytes] | None:
        """
        Return the lines that are not superseded; None: not certain, because a line is damaged.

        Args:
            superseded: nodes whose state later lines set.
            known: nodes of earlier lines.
        """
        nodes: dict[bytes, bytes] = {}
        exits: list[dict[bytes, bytes]] = []
        missing = self.member_names().union(known) if self._has_nodes else set()
        missing.difference_update(superseded)
        # The newest lines first: those before the last one of each node are not even split.
        for block in reversed(self._blocks):
            wanted = _NODES_OR_EXITS if missing else _EXITS if self._has_exits else None
            if wanted is None:
                break
            if wanted.search(block.data, block.start, block.end):
                of_nodes, of_ranks = self._select_lines(block)
                exits.append(of_ranks)
                if missing:
                    for name, line in of_nodes.items():
                        nodes.setdefault(name, line)
                    missing.difference_update(of_nodes)
        found = []
        if self._has_nodes:
            joins = [line for line in self._members if line.startswith(_JOINED)]
            # The last line of the kind joined of each node: the others do not have its workers.
            joined = dict(zip(_find_names(joins), joins, strict=True))
            for name, last in nodes.items():
                if name.endswith(b"\\") or not name:  # an escaped quote, or a cut line
                    return None
                if name in superseded:
                    continue
                join = joined.get(name, last)
                if join is not last:
                    found.append(join)
                found.append(last)
        last_exits: dict[bytes, bytes] = {}
        for of_ranks in reversed(exits):
            last_exits.update(of_ranks)
        if b"" in last_exits:
            return None
        found += last_exits.values()
        found += self._find_last(_PROGRESS)
        found += self._find_last(_USAGE)
        found += self._texts
        return found

    def _select_lines(self, block: LogBlock) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """Return the last line of each node and rank in a block; an empty rank is not certain."""
        of_nodes: list[bytes] = []
        of_ranks: list[bytes] = []
        adders = dict.fromkeys(_NODE_HEADS, of_nodes.append) if self._has_nodes else {}
        if self._has_exits:
            adders |= dict.fromkeys(_EXIT_HEADS, of_ranks.append)
        find_adder = adders.get
        for line in block.split_lines():
            if add := find_adder(line[:_HEAD_BYTES]):
                add(line)
        exits = {}
        for line in of_ranks:
            rank, _, rest = line.partition(b', "rank": ')[2].partition(b",")
            if not rest.startswith(b' "node": "') or rest.startswith(b' "node": ""'):
                rank = b""  # the node of an earlier line counts
            exits[rank] = line
        return dict(zip(_find_names(of_nodes), of_nodes, strict=True)), exits

    def _find_last(self, head: bytes) -> Iterator[bytes]:
        """Yield the last line of a kind, if there is one."""
        for data, start, end in reversed(self._blocks):
            if (found := data.rfind(head, start, end)) >= 0:
                last = data.find(b"\n", found + 1, end)
                yield data[found + 1 : end if last < 0 else last]
                return


def _find_names(lines: Collection[bytes]) -> list[bytes]:
    return [line.partition(b', "node": "')[2].partition(b'"')[0] for line in lines]
