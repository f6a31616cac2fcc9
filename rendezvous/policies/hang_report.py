"""
The hang report: collects the stacks of all workers when one hangs, and groups them.

A worker that is idle may only wait for one that works. Each idle worker is reported once it has
been idle for the timeout. The first of these reports opens an inquiry. If some workers work, the
inquiry stays open for HOLD_SECONDS, and then the scheduler waits for the reports of exactly these
(`IdleWorkers.active`). So the last worker that becomes idle is the one that decides, however many
nodes there are and whenever each of them reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pdrun.rendezvous.policies.collectives import (
    MAX_SHOWN_COLLECTIVES,
    MissingRanks,
    describe_collective,
    find_missing,
)
from pdrun.rendezvous.policies.restart import mask_numbers
from pdrun.rendezvous.protocol.messages import CollectiveReport, StackGroup

STACK_SECONDS = 5.0
"""Time for the nodes to send the stacks of their workers."""
HOLD_SECONDS = 1.0
"""
Time for which an inquiry that found working ranks waits for their reports: nodes notice the same
hang at slightly different times.
"""
MAX_GROUPS = 64
"""Number of different stacks that are kept; workers with further ones are only counted."""
MAX_COLLECTIVES = 256
"""Different collectives that are kept."""
MAX_SHOWN_GROUPS = 6
MAX_SHOWN_LINES = 12
MAX_LINE_CHARS = 200


@dataclass
class IdleWorkers:
    """The idle workers of a generation that may be waiting for others."""

    reports: dict[int, tuple[str, str]] = field(default_factory=dict)
    """rank -> node and reason, of the ranks that were reported, in the order of the reports."""
    active: set[int] = field(default_factory=set)
    """
    Ranks that worked at the last inquiry, and have neither ended nor been reported as idle since.
    """
    exit_at: float = float("-inf")
    """Time of the last end of a worker. Workers that waited for it have the timeout to go on."""
    timeout: float = 0.0
    """The hang timeout, from the reports."""

    def add_report(self, rank: int, node: str, why: str, timeout: float) -> None:
        """A rank has been idle for the timeout."""
        self.reports.setdefault(rank, (node, why))
        self.active.discard(rank)
        self.timeout = timeout

    def on_exit(self, rank: int, now: float) -> None:
        """A worker has ended."""
        self.reports.pop(rank, None)
        self.active.discard(rank)
        self.exit_at = now

    def is_inquiry_due(self, now: float) -> bool:
        """Whether no rank is known to work, so that all ranks must be asked."""
        return bool(self.reports) and not self.active and now >= self.exit_at + self.timeout


@dataclass
class HangInquiry:
    """A hang whose stacks are being collected."""

    rank: int
    node: str
    why: str
    deadline: float
    waiting: dict[str, str]
    """agent -> name, of the nodes that have not answered."""
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """Stack without the parts that differ between processes -> (stack, ranks)."""
    ungrouped_ranks: list[int] = field(default_factory=list)
    """Ranks with stacks beyond MAX_GROUPS."""
    may_be_waiting: bool = False
    """The worker may only be waiting for one that works (`Hung.waits`)."""
    active: set[int] = field(default_factory=set)
    """Ranks that work."""
    spinning: set[int] = field(default_factory=set)
    """Ranks that use CPU time, but only to wait in a collective."""
    collectives: dict[CollectiveReport, set[int]] = field(default_factory=dict)
    """The collectives of all ranks (without `CollectiveReport.ranks`), and the ranks."""
    known_ranks: set[int] = field(default_factory=set)
    """Ranks of the nodes that have answered."""

    @property
    def is_false_alarm(self) -> bool:
        """
        Whether there is no hang: the idle worker waits for one that works, or ranks spin in a
        collective that all ranks have joined.
        """
        if not self.may_be_waiting:
            return False
        return bool(self.active) or bool(self.spinning and not self.find_missing())

    def find_missing(self) -> list[MissingRanks]:
        """Return the collectives in which ranks wait for others that are not there."""
        states = [replace(state, ranks=tuple(who)) for state, who in self.collectives.items()]
        return find_missing(states, self.known_ranks, self.active)

    def is_complete(self, now: float) -> bool:
        """Whether nothing more is expected that could change the result."""
        if now >= self.deadline:
            return True
        hold_until = self.deadline - STACK_SECONDS + HOLD_SECONDS
        return not self.waiting and (not self.is_false_alarm or now >= hold_until)

    def blame(self, rank: int, node: str, why: str) -> None:
        """A rank certainly hangs: it does not wait for others."""
        if self.may_be_waiting:
            self.rank = rank
            self.node = node
            self.why = why
            self.may_be_waiting = False

    def find_culprit(self) -> int:
        """
        Return the rank to blame: one that is missing in a collective, or the only one with another
        stack than two or more others, otherwise the reported one.
        """
        missing = [rank for found in self.find_missing() for rank in found.missing]
        if missing:
            return self.rank if self.rank in missing else min(missing)
        found = sorted((ranks for _, ranks in self.groups.values()), key=len)
        alone = len(found) == 2 and not self.ungrouped_ranks and len(found[0]) == 1 < len(found[1])
        return found[0][0] if alone and self.rank in found[1] else self.rank

    def explain(self, rank: int) -> str:
        """Return why a rank is blamed, one line."""
        for found in self.find_missing():
            if rank in found.missing:
                others = format_ranks(found.state.ranks)
                verb = "waits" if len(found.state.ranks) == 1 else "wait"
                where = f"{describe_collective(found.state)}, in which {others} {verb}"
                about = f"it is missing in {where}"
                # that the reported rank waits says nothing of the missing one
                is_others = rank != self.rank and self.rank in self.spinning
                return about if is_others else f"{self.why}; {about}"
        return self.why

    def add_collectives(
        self, states: Iterable[CollectiveReport], spinning: Iterable[int], ranks: range
    ) -> None:
        """Take what a node says of collectives. Only ``ranks``, which are its own, count."""
        self.known_ranks.update(ranks)
        self.spinning.update(rank for rank in spinning if rank in ranks)
        for state in states:
            key = replace(state, ranks=())
            mine = {rank for rank in state.ranks if rank in ranks}
            if key in self.collectives:
                self.collectives[key] |= mine
            elif mine and len(self.collectives) < MAX_COLLECTIVES:
                self.collectives[key] = mine

    def add_answer(
        self, agent: str, groups: Iterable[StackGroup], ranks: range, active: Iterable[int] = ()
    ) -> None:
        """Take a node's first answer. Only ``ranks``, which are its own, count."""
        if self.waiting.pop(agent, None) is None:
            return
        self.active.update(rank for rank in active if rank in ranks)
        left = set(ranks)
        for group in groups:
            mine = sorted(rank for rank in set(group.ranks) if rank in left)
            left.difference_update(mine)
            key = mask_numbers(group.stack)
            if key in self.groups:
                self.groups[key][1].extend(mine)
            elif not mine:
                continue
            elif len(self.groups) < MAX_GROUPS:
                self.groups[key] = (group.stack, mine)
            else:
                self.ungrouped_ranks.extend(mine)

    def render_report(self, silent: Mapping[str, range]) -> str:
        """
        Return the report: the largest group of workers first, then the others.

        Args:
            silent: ranks of the nodes that have not answered, by node name.
        """
        found = sorted(self.groups.values(), key=lambda group: (-len(group[1]), min(group[1])))
        lines = []
        for missing in self.find_missing()[:MAX_SHOWN_COLLECTIVES]:
            waits = "waits" if len(missing.state.ranks) == 1 else "wait"
            verb = "is" if len(missing.missing) == 1 else "are"
            lines.append(
                f"{format_ranks(missing.state.ranks)} {waits} in"
                f" {describe_collective(missing.state)}: {format_ranks(missing.missing)} {verb}"
                " missing"
            )
        for place, (stack, ranks) in enumerate(found[:MAX_SHOWN_GROUPS]):
            verb = "is" if len(ranks) == 1 else "are"
            lines.append(f"{format_ranks(ranks)} {verb} {'elsewhere' if place else 'here'}:")
            lines += [f"  {line}" for line in _shorten_stack(stack)]
        rest = [
            rank for _, ranks in found[MAX_SHOWN_GROUPS:] for rank in ranks
        ] + self.ungrouped_ranks
        if rest:
            lines.append(
                f"{format_ranks(rest)} {'is' if len(rest) == 1 else 'are'} at other places"
            )
        if silent:
            who = ", ".join(
                f"{name} ({format_ranks(ranks)})" for name, ranks in list(silent.items())[:8]
            )
            more = f" and {len(silent) - 8} more nodes" if len(silent) > 8 else ""
            lines.append(f"no answer within {STACK_SECONDS:g} s from {who}{more}")
        return "\n".join(lines)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-6, 8``; at most the first eight pieces."""
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in pieces]
    single = len(texts) == 1 and pieces[0][0] == pieces[0][1]
    return f"rank{'' if single else 's'} {', '.join(texts[:8])}{' ...' if len(texts) > 8 else ''}"


def _shorten_stack(stack: str) -> list[str]:
    lines = [line[:MAX_LINE_CHARS] for line in stack.splitlines() if line.strip()]
    more = len(lines) - MAX_SHOWN_LINES
    return [*lines[:MAX_SHOWN_LINES], f"... {more} more lines"] if more > 0 else lines
