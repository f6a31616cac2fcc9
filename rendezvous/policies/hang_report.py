"""The hang report: collects the stacks of all workers when one hangs, and groups them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdrun.rendezvous.policies.restart import mask_numbers
from pdrun.rendezvous.protocol.messages import StackGroup

STACK_SECONDS = 5.0
"""Time for the nodes to send the stacks of their workers."""
MAX_GROUPS = 64
"""Number of different stacks that are kept; workers with further ones are only counted."""
MAX_SHOWN_GROUPS = 6
MAX_SHOWN_LINES = 12
MAX_LINE_CHARS = 200


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
    is_any_active: bool = False
    """Whether any worker works."""

    @property
    def is_false_alarm(self) -> bool:
        """Whether there is no hang: the idle worker waits for one that works."""
        return self.may_be_waiting and self.is_any_active

    def find_culprit(self) -> int:
        """
        Return the rank to blame: the only one with another stack than two or more others, otherwise
        the reported one.
        """
        found = sorted((ranks for _, ranks in self.groups.values()), key=len)
        alone = len(found) == 2 and not self.ungrouped_ranks and len(found[0]) == 1 < len(found[1])
        return found[0][0] if alone and self.rank in found[1] else self.rank

    def add_answer(
        self, agent: str, groups: Iterable[StackGroup], ranks: range, active: Iterable[int] = ()
    ) -> None:
        """Take a node's first answer. Only ``ranks``, which are its own, count."""
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
        Return the report: the largest group of workers first, then the others.

        Args:
            silent: ranks of the nodes that have not answered, by node name.
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
