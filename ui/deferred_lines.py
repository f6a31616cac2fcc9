"""
Lines of an event log that are superseded by later ones: unread until their effect is needed.

Of the progress of a job, the states of a node and the exits of a rank only the last line counts.
A large log has a million lines, so most of them are not even split here: regular expressions find
those that count, a block at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from pdrun.ui.event_fields import ExitFields, find_exits

MAX_WARNINGS = 1000
"""Warnings that a status keeps: the newest ones."""
_PREFIX = b'{"kind": "'
_PROGRESS = b"\n" + _PREFIX + b"progress"
_USAGE = b"\n" + _PREFIX + b"usage"
_EXIT = b"\n" + _PREFIX + b"exit"
_FREQUENT = rb"prog|usag|susp|reco|exit|refu"
_MEMBERS = rb"join|lost|left|stan"
_TEXTS = rb"warn|hang"
_NODES = rb"susp|reco|" + _MEMBERS


def _compile(kinds: bytes, rest: bytes = b"") -> re.Pattern[bytes]:
    return re.compile(rb'\n(?=\{"kind": "(?:' + kinds + rb")" + rest + rb")")


def _compile_others(kinds: bytes) -> re.Pattern[bytes]:
    return re.compile(rb'\n(?!\{"kind": "(?:' + kinds + rb"))")


_RARE_LINE = _compile_others(_FREQUENT)
_MEMBER_OR_TEXT = re.compile(rb'\{"kind": "(?:' + _MEMBERS + b"|" + _TEXTS + rb")")

_NODE = rb'[a-z]*"(?:, "time": [^,\n]*, "node": "([^"\\\n]*)")?'
_RANK = rb'[a-z]*"(?:, "time": [^,\n]*, "generation": \d+, "rank": (\d+), "node": "[^"])?'
"""Both groups are empty if the line has another form: it must be read to know what it concerns."""
_LINE = re.compile(rb"(.*)")
NODE_LINES = re.compile(_compile(_NODES, _NODE).pattern + _LINE.pattern)
_OTHER_LINES = re.compile(
    _compile_others(_FREQUENT + b"|" + _TEXTS).pattern
    + rb'(?=(?:\{"kind": "(?:(join)|(lost|left|stan))'
    + _NODE
    + rb")?)(.*)"
)
"""Nodes that join or leave, with their name; lines of other kinds have neither of the first two."""
_EXIT_LINES = re.compile(_compile(b"exit", _RANK).pattern + _LINE.pattern)
_TEXT_LINES = re.compile(_compile(_TEXTS).pattern + _LINE.pattern)


class LogBlock(NamedTuple):
    """Lines of a log: each one between ``start`` and ``end`` has a line end before it."""

    data: bytes
    start: int
    end: int
    is_mixed: bool
    """Whether nodes join or leave in it, or it has warnings."""

    def split_lines(self) -> list[bytes]:
        """Return the lines."""
        return self.data[self.start + 1 : self.end].split(b"\n")

    def find_exits(self) -> list[ExitFields] | None:
        """Return the exits; None: a line about an exit has another form."""
        first = self.data.find(_EXIT, self.start, self.end)
        return find_exits(memoryview(self.data)[first : self.end]) if first >= 0 else []

    def last_exits(self, unclear: list[bytes]) -> dict[str, ExitFields | bytes]:
        """
        Return the last exit of each rank, where lines have any form.

        Lines whose rank is not certain are added to ``unclear``.
        """
        lines = _take_last(self.find_lines(_EXIT_LINES), unclear)
        return {
            rank.decode("ascii"): next(iter(find_exits(b"\n" + line) or ()), line)
            for rank, line in lines.items()
        }

    def find_lines(self, pattern: re.Pattern[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the name, or rank, and the line of each match."""
        return pattern.findall(self.data, self.start, self.end)


class LastLines(NamedTuple):
    """The lines that are not superseded."""

    lines: list[bytes]
    exits: list[ExitFields]
    """The exits that `find_exits` has read, in order: of a rank only the last one counts."""
    unclear: list[bytes]
    """Lines whose node or rank is not known. If any of them is an event, all lines must be read."""


class DeferredLines:
    """Lines between two others that change single nodes and ranks, the progress and warnings."""

    def __init__(self) -> None:
        self._blocks: list[LogBlock] = []
        self._joins: dict[bytes, bytes] = {}
        """Node -> its last line of the kind ``joined``; the others do not have its workers."""
        self._members: set[bytes] = set()
        """Nodes that may appear for the first time."""
        self._has_nodes = self._has_exits = True

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add_lines(self, block: bytes, start: int, end: int) -> tuple[int, int]:
        """
        Add lines of a block, up to one that cannot be deferred.

        Args:
            block: lines, each with a line end before it.
            start: index of the first one.
            end: index after the last one.

        Returns:
            the first and last index of the line that cannot be deferred; two equal ones: there is
            none.
        """
        match = _RARE_LINE.search(block, start, end)
        if match is None:
            self._add_block(LogBlock(block, start, end, False))
            return end, end
        position = match.start()
        is_mixed = _MEMBER_OR_TEXT.match(block, match.end()) is not None
        if is_mixed:
            position = self._add_members(block, position, end)
        self._add_block(LogBlock(block, start, position, is_mixed))
        if position == end:
            return end, end
        stop = block.find(b"\n", position + 1, end)
        return position + 1, stop if stop >= 0 else end

    def _add_members(self, block: bytes, start: int, end: int) -> int:
        """Note the nodes that join or leave, up to a line that cannot be deferred: its index."""
        for match in _OTHER_LINES.finditer(block, start, end):
            is_join, is_other, name, line = match.groups()
            if is_join:
                self._joins[name or b""] = line
            elif not is_other:
                return match.start()
            self._members.add(name or b"")
        return end

    def _add_block(self, block: LogBlock) -> None:
        if block.end > block.start:
            self._blocks.append(block)

    def drop_exits(self) -> None:
        """Forget the exits: a new generation begins."""
        self._has_exits = False

    def drop_nodes(self) -> None:
        """Forget the states of nodes: later lines set them."""
        self._has_nodes = False

    def drop_lines(self, dropped: Collection[bytes]) -> None:
        """Forget lines that are no events, wherever they are."""
        blocks, self._blocks = self._blocks, []
        self._joins, self._members = {}, set()
        for block in blocks:
            if any(block.data.find(line, block.start, block.end) >= 0 for line in dropped):
                kept = [b"", *(line for line in block.split_lines() if line not in dropped)]
                data = b"\n".join(kept)
                block = LogBlock(data, 0, len(data), block.is_mixed)
            if block.is_mixed:
                self._add_members(*block[:3])
            self._add_block(block)

    def member_names(self) -> set[bytes]:
        """Return the names of the nodes that may appear for the first time in these lines."""
        return self._members

    def all_lines(self) -> list[bytes]:
        """Return all lines, in order."""
        return [line for block in self._blocks for line in block.split_lines()]

    def last_lines(
        self, superseded: Collection[bytes] = (), known: Iterable[bytes] = ()
    ) -> LastLines:
        """
        Return the lines that are not superseded.

        Args:
            superseded: nodes whose state later lines set.
            known: nodes of earlier lines.
        """
        states: list[dict[bytes, bytes]] = []
        exits: list[list[ExitFields] | None] = []
        unclear: list[bytes] = []
        missing = self._members.union(known) if self._has_nodes else set()
        missing.difference_update(superseded)
        # The newest lines first: those before the last one of each node are not looked at.
        for block in reversed(self._blocks):
            if not missing and not self._has_exits:
                break
            if missing:
                of_nodes = _take_last(block.find_lines(NODE_LINES), unclear)
                missing.difference_update(of_nodes)
                states.append(of_nodes)
            if self._has_exits:
                exits.append(block.find_exits())
        lines = []
        if self._has_nodes:
            nodes: dict[bytes, bytes] = {}
            for of_nodes in reversed(states):
                nodes.update(of_nodes)
            for name, last in nodes.items():
                if name in superseded:
                    continue
                join = self._joins.get(name, last)
                if join != last:
                    lines.append(join)
                lines.append(last)
        exits.reverse()
        rows = list(chain.from_iterable(filter(None, exits)))
        if None in exits:
            last_exits = self._merge_exits(exits, unclear)
            lines += [found for found in last_exits if isinstance(found, bytes)]
            rows = [found for found in last_exits if not isinstance(found, bytes)]
        lines += self._find_last(_PROGRESS)
        lines += self._find_last(_USAGE)
        lines += self._find_texts()
        return LastLines(lines, rows, unclear)

    def _merge_exits(
        self, exits: Iterable[list[ExitFields] | None], unclear: list[bytes]
    ) -> Collection[ExitFields | bytes]:
        """Return the last exit of each rank; ``exits`` has None for blocks with other forms."""
        merged: dict[str, ExitFields | bytes] = {}
        for block, rows in zip(self._blocks, exits, strict=True):
            if rows is None:
                merged.update(block.last_exits(unclear))
            else:
                merged.update((row[0], row) for row in rows)
        return merged.values()

    def _find_last(self, head: bytes) -> Iterator[bytes]:
        """Yield the last line of a kind, if there is one."""
        for data, start, end, _ in reversed(self._blocks):
            if (found := data.rfind(head, start, end)) >= 0:
                last = data.find(b"\n", found + 1, end)
                yield data[found + 1 : end if last < 0 else last]
                return

    def _find_texts(self) -> list[bytes]:
        texts: list[bytes] = []
        for block in reversed(self._blocks):
            if len(texts) >= MAX_WARNINGS:
                break
            if block.is_mixed:
                texts[:0] = _TEXT_LINES.findall(block.data, block.start, block.end)
        return texts[-MAX_WARNINGS:]


def _take_last(found: list[tuple[bytes, bytes]], unclear: list[bytes]) -> dict[bytes, bytes]:
    """Return the last line of each name or rank; lines without one are added to ``unclear``."""
    last = dict(found)
    if b"" in last:
        unclear += [line for name, line in found if not name]
        del last[b""]
    return last
