"""
The usual pipeline schedules, for any number of ranks, micro-batches and chunks.

    gpipe           all forwards, then all backwards; all micro-batches are live
                    (Huang et al. 2019, 1811.06965)
    1f1b            one forward, one backward; as many live micro-batches as stages follow
                    (Narayanan et al. 2021, 2006.09503)
    interleaved     1f1b over several chunks per rank, which divide the bubble
                    (Narayanan et al. 2021, 2104.04473)
    zero-bubble     backward for weights fills the bubble; memory of 1f1b
                    (Qi et al. 2023, 2401.10241, ZB-H1)
    zero-bubble-v   the same with two chunks per rank, in a V
                    (Qi et al. 2024, 2405.15362, ZB-V)
    seqpipe         1f1b over slices of sequences: the keys and values of earlier slices stay on
                    their stage, backwards run from the last slice to the first
                    (Sun et al. 2024, 2406.03488, Seq1F1B)
    seqvpp          the same with several chunks per rank
    seqsmartvpp     the same with fewer forwards ahead of the first backward, so fewer live
                    activations

All but zero-bubble-v follow from counts. That one is made by a list scheduler: at each time step
every free rank takes the most urgent action that is ready and that its memory allows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.schedules.schedule import (
    API_NAME,
    ActionKind,
    PipelineSchedule,
    StageAction,
    prerequisites_of,
)

MINDSPORE_NAMES = {"zero_bubble": "zero-bubble", "zero_bubble_v": "zero-bubble-v"}
"""Schedules that MindSpore spells in another way."""
DEFAULT_CHUNKS = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero-bubble": 1,
    "zero-bubble-v": 2,
    "seqpipe": 1,
    "seqvpp": 2,
    "seqsmartvpp": 2,
}
SLICED = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Schedules over slices of sequences."""
DEFAULT_SLICES = 2
ANY_CHUNKS = ("interleaved", "seqvpp", "seqsmartvpp")
"""Schedules that take any number of chunks."""


def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, slices: int | None = None
) -> PipelineSchedule:
    """
    Return a schedule by its name.

    Args:
        name: one of `DEFAULT_CHUNKS`, also as MindSpore spells it.
        ranks: along pp.
        chunks: stages per rank; default: see `DEFAULT_CHUNKS`.
        slices: parts of each sequence; default: `DEFAULT_SLICES` for `SLICED`, 1 for others.

    Raises:
        UsageError: an unknown name, or chunks, slices or ranks that it does not support;
            `pdrun.Pipeline` checks the rest.
    """
    name = MINDSPORE_NAMES.get(name, name)
    if name not in DEFAULT_CHUNKS:
        raise UsageError(
            f"there is no schedule {name!r}",
            where=API_NAME,
            hint=f"one of {', '.join(DEFAULT_CHUNKS)}",
        )
    chunks = DEFAULT_CHUNKS[name] if chunks is None else chunks
    if (name not in ANY_CHUNKS and chunks != DEFAULT_CHUNKS[name]) or chunks < 1:
        what = f"chunks={chunks}, and {name} has {DEFAULT_CHUNKS[name]} a rank"
        raise UsageError(
            what, where=API_NAME, hint=f"{', '.join(ANY_CHUNKS)} take any number of chunks"
        )
    count = (DEFAULT_SLICES if name in SLICED else 1) if slices is None else slices
    if count > 1 and name not in SLICED:
        what = f"slices={count}, and {name} does not slice sequences"
        raise UsageError(what, where=API_NAME, hint=f"schedule= one of {', '.join(SLICED)}")
    if name == "seqsmartvpp" and ranks % 2:
        what = f"seqsmartvpp needs an even number of ranks along pp, got {ranks}"
        raise UsageError(what, where=API_NAME, hint='schedule="seqvpp" takes any number')
    rows: Callable[[int, int], list[list[StageAction]]] = {
        "gpipe": build_gpipe,
        "1f1b": build_1f1b,
        "zero-bubble": build_zero_bubble,
        "zero-bubble-v": build_zero_bubble_v,
        "interleaved": lambda ranks, microbatches: build_interleaved(ranks, microbatches, chunks),
        "seqpipe": lambda ranks, microbatches: build_sliced(ranks, microbatches, chunks, count, 1),
        "seqvpp": lambda ranks, microbatches: build_sliced(ranks, microbatches, chunks, count, 2),
        "seqsmartvpp": lambda ranks, microbatches: build_sliced(
            ranks, microbatches, chunks, count, 1
        ),
    }[name]
    return PipelineSchedule(name, tuple(tuple(row) for row in rows(ranks, microbatches)), count)


def build_gpipe(ranks: int, microbatches: int) -> list[list[StageAction]]:
    """Return each rank's actions: all forwards, then all backwards."""
    micros = range(microbatches)
    return [
        [StageAction(r, "F", m) for m in micros] + [StageAction(r, "B", m) for m in micros]
        for r in range(ranks)
    ]


def build_1f1b(ranks: int, microbatches: int) -> list[list[StageAction]]:
    """Return each rank's actions: as many forwards as stages follow, then one of each in turn."""
    micros = range(microbatches)
    return [
        _alternate_actions(
            [StageAction(r, "F", m) for m in micros],
            [StageAction(r, "B", m) for m in micros],
            ranks - 1 - r,
        )
        for r in range(ranks)
    ]


def build_interleaved(ranks: int, microbatches: int, chunks: int) -> list[list[StageAction]]:
    """
    Return each rank's actions with stage ``c * ranks + r`` as chunk c of rank r.

    Micro-batches pass the chunks in groups of about ``ranks``: a group through chunk 0, then
    through chunk 1, and so on.
    """
    if chunks == 1:
        return build_1f1b(ranks, microbatches)
    count = max(1, microbatches // ranks)
    bounds = [microbatches * i // count for i in range(count + 1)]
    groups = [range(low, high) for low, high in pairwise(bounds)]
    longest = max(len(group) for group in groups)

    def order(rank: int, kind: ActionKind, turn: range) -> list[StageAction]:
        return [
            StageAction(c * ranks + rank, kind, m) for group in groups for c in turn for m in group
        ]

    return [
        _alternate_actions(
            order(rank, "F", range(chunks)),
            order(rank, "B", range(chunks)[::-1]),
            (chunks - 1) * longest + 2 * (ranks - 1 - rank),
        )
        for rank in range(ranks)
    ]


def build_sliced(
    ranks: int, microbatches: int, chunks: int, slices: int, lead: int
) -> list[list[StageAction]]:
    """
    Return each rank's actions on pieces (micro-batch * slices + slice), with stage
    ``c * ranks + r`` as chunk c of rank r.

    Micro-batches pass the chunks in the smallest groups with as many pieces as ranks, if there are
    so many.

    Args:
        lead: forwards that a rank is ahead of the next one.
    """
    count = max(1, microbatches // -(-ranks // slices))
    bounds = [microbatches * i // count for i in range(count + 1)]
    groups = [range(low, high) for low, high in pairwise(bounds)]
    longest = max(len(group) for group in groups)

    def order(rank: int, kind: ActionKind, turn: range, inner: range) -> list[StageAction]:
        return [
            StageAction(c * ranks + rank, kind, m * slices + s)
            for group in groups
            for c in turn
            for m in group
            for s in inner
        ]

    return [
        _alternate_actions(
            order(rank, "F", range(chunks), range(slices)),
            order(rank, "B", range(chunks)[::-1], range(slices)[::-1]),
            (chunks - 1) * longest * slices + slices - 1 + lead * (ranks - 1 - rank),
        )
        for rank in range(ranks)
    ]


def _alternate_actions(
    forwards: list[StageAction], backwards: list[StageAction], ahead: int
) -> list[StageAction]:
    """
    Return ``ahead`` forwards, then one forward and one backward in turn, then the remaining
    backwards.
    """
    ahead = min(ahead, len(forwards))
    found = forwards[:ahead]
    for place, forward in enumerate(forwards[ahead:]):
        found += [forward, backwards[place]]
    return found + backwards[len(forwards) - ahead :]


def build_zero_bubble(ranks: int, microbatches: int) -> list[list[StageAction]]:
    """
    Return each rank's actions with split backwards.

    Rank r computes the weights r micro-batches late, when 1f1b would wait. No rank has more live
    micro-batches than rank 0 under 1f1b.
    """
    rows = []
    for r in range(ranks):
        forwards = [StageAction(r, "F", m) for m in range(microbatches)]
        weights = [StageAction(r, "W", m) for m in range(microbatches)]
        row = forwards[: ranks - r]
        for m in range(microbatches):
            row += [StageAction(r, "I", m), *weights[max(m - r, 0) : m - r + 1 if m >= r else 0]]
            row += forwards[ranks - r + m : ranks - r + m + 1]
        rows.append(row + weights[max(microbatches - r, 0) :])
    return rows


def build_zero_bubble_v(ranks: int, microbatches: int) -> list[list[StageAction]]:
    """
    Return each rank's actions with stages r and ``2 * ranks - 1 - r`` on rank r, and split
    backwards.

    Every action takes one unit of time. Each rank does the most urgent action that is ready: the
    forward of its later stage, of its earlier one, a backward. It computes weights if no other
    action is ready, or if the memory is full (``2 * ranks`` live micro-batches of half a stage
    each, as on rank 0 under 1f1b).
    """
    stages = 2 * ranks
    keep = 2 * ranks
    ended: dict[StageAction, int] = {}
    done = {(stage, kind): 0 for stage in range(stages) for kind in _KINDS_BY_URGENCY}
    rows: list[list[StageAction]] = [[] for _ in range(ranks)]
    now = 0
    while len(ended) < len(done) * microbatches:
        chosen = []
        for rank in range(ranks):
            mine = (stages - 1 - rank, rank)
            full = sum(done[stage, "F"] - done[stage, "W"] for stage in mine) >= keep
            for kind in _KINDS_BY_URGENCY:
                actions = [
                    StageAction(stage, kind, done[stage, kind])
                    for stage in mine
                    if done[stage, kind] < microbatches
                ]
                ready = (
                    a
                    for a in actions
                    if all(
                        ended.get(need, now + 1) <= now
                        for need in prerequisites_of(a, stages, True)
                    )
                )
                action = None if kind == "F" and full else next(ready, None)
                if action is not None:
                    chosen.append((rank, action))
                    break
        now += 1
        for rank, action in chosen:
            rows[rank].append(action)
            ended[action] = now
            done[action.stage, action.kind] += 1
    return rows


_KINDS_BY_URGENCY: tuple[ActionKind, ...] = ("F", "I", "W")
