"""Stacks of a large job: what is kept of them is bounded, and no rank is forgotten."""

from __future__ import annotations

from pdrun.rendezvous.policies.hang_report import MAX_GROUPS, HangInquiry
from pdrun.rendezvous.protocol.messages import StackGroup


def letters(number: int) -> str:
    """Return a text that differs for each number, also without digits."""
    return chr(ord("a") + number // 26) + chr(ord("a") + number % 26)


def test_stacks_beyond_the_limit_are_only_counted() -> None:
    count = MAX_GROUPS + 36
    inquiry = HangInquiry(0, "n", "why", 5.0, {"agent": "n"})
    stacks = [StackGroup((rank,), f"stack {letters(rank)}") for rank in range(count)]
    inquiry.add_answer("agent", stacks, range(count))
    assert len(inquiry.groups) == MAX_GROUPS
    assert inquiry.ungrouped_ranks == list(range(MAX_GROUPS, count))
