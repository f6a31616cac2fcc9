"""
Where is everybody? Collects the workers' stacks over all nodes when one hangs, and draws one
picture of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdrun.rendezvous.policies.restart import mask_numbers
from pdrun.rendezvous.protocol.messages import StackGroup

STACK_SECONDS = 5.0
"""Seconds that the nodes have to tell their workers' stacks."""
MAX_GROUPS = 64
"""Different stacks that are kept; workers at further ones are only counted."""
MAX_SHOWN_GROUPS = 6
MAX_SHOWN_LINES = 12
MAX_LINE_CHARS = 200


@dataclass
class HangInquiry:
    """One hang that is being looked into."""

    rank: int
    node: str
    why: str
    deadline: float
    waiting: dict[str, str]
    """agent -> name, of the nodes that have not answered."""
    groups: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """stack without what differs between processes -> (stack, ranks)"""
    ungrouped_ranks: list[int] = field(default_factory=list)
    """Ranks at stacks beyond MOST_GROUPS."""
    may_be_waiting: bool = False
    """The worker may only be waiting for one that is at work (`Hung.waits`)."""
    is_any_active: bool = False
    """Whether some worker is at work."""

    @property
    def is_false_alarm(self) -> bool:
        """Whether there is no hang: who is quiet waits for who is at work."""
        return self.may_be_waiting and self.is_any_active

    def find_culprit(self) -> int:
        """
        Return the rank to blame: the only one that is elsewhere than two or more others, else who
        was told of.
        """
        found = sorted((ranks for _, ranks in self.groups.values()), key=len)
        alone = len(found) == 2 and not self.ungrouped_ranks and len(found[0]) == 1 < len(found[1])
        return found[0][0] if alone and self.rank in found[1] else self.rank

    def add_answer(
        self, agent: str, groups: Iterable[StackGroup], ranks: range, active: Iterable[int] = ()
    ) -> None:
        """One node answers; only its first answer, and only ``ranks``, which are its own, count."""
        if self.waiting.pop(agent, None) is None:
            return
        self.is_any_active = self.is_any_active or any(rank in ranks for rank in active)
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
        Return the picture: the largest group of workers first, then who is elsewhere.

        Args:
            silent: the ranks of the nodes that have not answered, by the node's name.
        """
        found = sorted(self.groups.values(), key=lambda group: (-len(group[1]), min(group[1])))
        lines = []
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
    """Return ``rank 3``, ``ranks 0-6, 8``; of many pieces the first ones."""
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
