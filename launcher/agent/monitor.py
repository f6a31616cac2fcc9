"""
What an agent learns of its running workers, and tells the scheduler: progress, hangs, stacks.

    worker --datagram--> Channel --> Progress            at most every `every` seconds, what has changed
    /proc, output ------> Watch  --> Hung                once a rank and generation
    ShowStacks ---------> Inquiry -> Stacks              within 3 s

Who only waits for others is as quiet as one that hangs. So "no output and no CPU time" counts only
while no worker of this node is at work; for the scheduler, which asks the other nodes, the answer
names those who are (`Stacks.active`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdrun.clock import Clock
from pdrun.launcher.agent.channel import Channel, Told
from pdrun.launcher.agent.interfaces import Keeper, WorkerOutput
from pdrun.launcher.agent.worker_group import Group
from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis.hangs import Seen, Suspicion, Watch
from pdrun.launcher.diagnosis.stack_collector import Inquiry
from pdrun.rendezvous.protocol.messages import Hung, Message, Progress, Stacks, Step

EVERY = 1.0
"""Seconds between two reports of progress, at least."""


class Reports:
    """See the module. One for an agent's life; `begin` once a generation."""

    def __init__(
        self, clock: Clock, send: Callable[[Message], None], say: Callable[[str], None]
    ) -> None:
        self._clock = clock
        self._send = send
        self._say = say
        self._channel: Channel | None = None
        self._tried = False
        self._group: Group | None = None
        self._inquiries: list[tuple[Inquiry, dict[int, str] | None]] = []
        """
        Each with what it was asked for: why some ranks are suspected, or None: because of
        ShowStacks.
        """
        self.every = EVERY

    def open(self, *, wrapped: bool, timeout: float | None) -> str:
        """
        Make the channel; return its path, empty where there can be none.

        Args:
            wrapped: the workers' processes are commands, below which the program proper may run.
            timeout: of hangs.
        """
        self._wrapped = wrapped
        self._timeout = timeout
        if not self._tried:
            self._tried = True
            try:
                self._channel = Channel()
            except OSError as error:
                self._say(f"workers cannot report progress: {error}")
        return self._channel.path if self._channel else ""

    def begin(self, group: Group, output: WorkerOutput, keeper: Keeper) -> None:
        """The workers of a generation start."""
        self._end_inquiries()
        self._group = group
        self._output = output
        self._keeper = keeper
        now = self._clock.monotonic()
        self._told: dict[int, Told] = {}
        """The last that each rank said."""
        self._speaker: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._moved: set[int] = set()
        self._sent_saved = -1
        self._progress_at = now
        self._watches: dict[int, Watch] = {}
        self._look_at = now
        self._hung: set[int] = set()
        """Ranks whose case is closed: told, or found to be at work."""
        self._again_at: dict[int, float] = {}
        """Ranks that were told to be quiet, and from when on to tell it again."""
        self._living = 0
        self._ended_at = float("-inf")
        """When a worker was last seen to have ended."""

    # The loop
    # ---------------------------------------------------------------------------------------------------------

    def filenos(self) -> Iterator[int]:
        """Descriptors that are readable when `turn` has something to do."""
        if self._channel is not None:
            yield self._channel.fileno()

    def deadline(self) -> float | None:
        """When `turn` is due although nothing is readable."""
        if self._group is None or self._group.done:
            return None
        times = [inquiry.deadline for inquiry, _ in self._inquiries]
        if self._group.started and not self._group.stopping:
            times.append(self._look_at)
        if self._moved:
            times.append(self._progress_at)
        return min(times, default=None)

    def turn(self) -> None:
        """Do what is there to be done."""
        self.read()
        group = self._group
        now = self._clock.monotonic()
        if group is None or not group.started:
            return
        if self._moved and now >= self._progress_at:
            self.flush()
        if now >= self._look_at and not group.stopping:
            self._look(group, now)
        for inquiry, suspects in list(self._inquiries):
            if now >= inquiry.deadline and inquiry.look(now):
                self._inquiries.remove((inquiry, suspects))
                self._answer(group, inquiry, suspects)
                inquiry.close()

    def close(self) -> None:
        """Let go of everything."""
        self._end_inquiries()
        if self._channel is not None:
            if self._channel.strange:
                self._say(
                    f"{self._channel.strange} messages on the workers' socket were none of pdrun's"
                )
            self._channel.close()
            self._channel = None

    # Progress
    # ---------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """
        Take what the workers have said; before their ends are told, or a step that was saved would
        come too late.
        """
        for told in self._channel.read() if self._channel else ():
            if self._counts(told):
                self._told[told.rank] = told
                self._moved.add(told.rank)
                if told.saved is not None:
                    self._saved[told.rank] = told.saved

    def _counts(self, told: Told) -> bool:
        """Whether it was said by a worker of this generation, not by a helper of one."""
        group = self._group
        if (
            group is None
            or not group.started
            or told.generation != group.generation
            or told.rank not in group.ranks
        ):
            return False
        pid = next((pid for rank, _, pid in group.alive() if rank == told.rank), 0)
        if self._wrapped:  # below a shell, say: the first that speaks is it
            return self._speaker.setdefault(told.rank, told.pid) == told.pid
        return not pid or not told.pid or told.pid == pid

    def flush(self) -> None:
        """Tell the scheduler now what it has not heard."""
        group = self._group
        if group is None or not self._moved:
            return
        steps = [self._told[rank] for rank in sorted(self._moved)]
        saved = min((self._saved.get(rank, -1) for rank in group.ranks), default=-1)
        moved = tuple(
            Step(told.rank, told.step, told.busy) for told in steps if told.step is not None
        )
        self._moved.clear()
        self._progress_at = self._clock.monotonic() + self.every
        if moved or saved != self._sent_saved:
            self._sent_saved = saved
            self._send(Progress(group.generation, moved, saved))

    # Hangs
    # ------------------------------------------------------------------------------------------------------------

    def _look(self, group: Group, now: float) -> None:
        suspects: list[tuple[tuple[bool, int, float], int, Suspicion]] = []
        alive = group.alive()
        for rank, _, pid in alive:
            seen = self._seen(rank, pid)
            if seen is None:
                self._watches.pop(rank, None)
                continue
            watch = self._watches.setdefault(rank, Watch(self._timeout, now))
            found = watch.look(seen, now)
            if (
                found is not None
                and rank not in self._hung
                and now >= self._again_at.get(rank, 0.0)
            ):
                order = (seen.letter != "T", -1 if seen.step is None else seen.step, -watch.quiet)
                suspects.append((order, rank, found))
        self._look_at = now + Watch(self._timeout, now).every
        if len(alive) < self._living:  # who waited for it takes a moment to see that
            self._ended_at = now
        self._living = len(alive)
        someone_works = any(self._works(rank) for rank, _, _ in alive)
        someone_works = someone_works or now - self._ended_at < (self._timeout or 0.0)
        ended = {rank: found.why for _, rank, found in suspects if found.ended}
        if ended and self._channel is not None:
            self._hung |= ended.keys()
            self._ask([worker for worker in alive if worker[0] in ended], now, ended)
        for _, rank, found in sorted(suspects, key=lambda suspect: suspect[:2]):
            if not found.ended and not (found.waits and someone_works):
                self._tell_hung(group, rank, found.why, waits=found.waits)

    def _seen(self, rank: int, pid: int) -> Seen | None:
        """Look at a worker; None: without a timeout there is no reason to."""
        traceback = self._output.traceback(rank) is not None and not self._output.survived(rank)
        if self._timeout is None and not traceback:
            return None
        state = procfs.state(pid)
        told = self._told.get(rank)
        return Seen(
            step=told.step if told else None,
            saved=self._saved.get(rank),
            heard=self._output.heard_at(rank),
            cpu=procfs.cpu_seconds(pid),
            letter=state.letter if state else "Z",
            traced=bool(state and state.tracer),
            traceback=traceback,
        )

    def _works(self, rank: int) -> bool:
        """Whether a worker has done something within the timeout, as far as can be seen."""
        watch = self._watches.get(rank)
        told = self._told.get(rank)
        if watch is None or self._timeout is None:
            return False
        return (watch.stuck if told and told.step is not None else watch.quiet) < self._timeout

    def _tell_hung(self, group: Group, rank: int, why: str, *, waits: bool = False) -> None:
        # the scheduler may know of one that is at work: then it is told again after as long a time
        if waits:
            self._again_at[rank] = self._clock.monotonic() + (self._timeout or 0.0)
        else:
            self._hung.add(rank)
        self.flush()
        self._send(Hung(group.generation, rank, why, waits))

    # Stacks
    # -----------------------------------------------------------------------------------------------------------

    def show_stacks(self, generation: int) -> None:
        """The scheduler wants to know where everybody is."""
        group = self._group
        if group is not None and group.started and group.generation == generation:
            self._ask(group.alive(), self._clock.monotonic(), None)

    def _ask(
        self, workers: list[tuple[int, int, int]], now: float, suspects: dict[int, str] | None
    ) -> None:
        def signal(slot: int, number: int) -> None:
            self._keeper.signal(slot, number, group=False)

        active = (
            tuple(rank for rank, _, _ in workers if self._works(rank)) if suspects is None else ()
        )
        if self._channel is not None:
            self._inquiries.append(
                (Inquiry(workers, self._channel.folder, signal, now, active), suspects)
            )
        elif self._group is not None:
            self._send(Stacks(self._group.generation, (), active))

    def _answer(self, group: Group, inquiry: Inquiry, suspects: dict[int, str] | None) -> None:
        if suspects is None:
            self._send(Stacks(group.generation, inquiry.groups(), inquiry.active))
            return
        alive = {rank for rank, _, _ in group.alive()}
        for rank, why in suspects.items():
            if rank in alive and not group.stopping and inquiry.ended(rank):
                self._tell_hung(group, rank, why)

    def _end_inquiries(self) -> None:
        for inquiry, _ in self._inquiries:
            inquiry.close()
        self._inquiries = []
