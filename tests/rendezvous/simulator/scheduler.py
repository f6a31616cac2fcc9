"""
The scheduler's process: the product's own `Service`, machine and journal, killed, paused and
started again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdrun.eventlog import LogEvent
from pdrun.rendezvous.journal import file as journal
from pdrun.rendezvous.journal import recovery
from pdrun.rendezvous.membership.invariants import check_invariants
from pdrun.rendezvous.membership.machine import Membership
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Heartbeat, Verdict
from pdrun.rendezvous.scheduler.ping_counter import MAX_UNANSWERED_PINGS, PING_SECONDS
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.base import EnvelopeArrived

from .judge import Violation
from .network import Network, SchedulerDied
from .world import World


@contextmanager
def quick_disk() -> Iterator[None]:
    """
    Within: the journal writes in its own thread. A disk that hangs is not simulated, and a thread
    started for each commit is half of a life's time.
    """

    before = journal.BackgroundCall
    journal.BackgroundCall = _Inline  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        journal.BackgroundCall = before  # type: ignore[misc]


class _Inline:
    """As `pdrun.disk.BackgroundCall`: what it was given has been tried."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        try:
            call()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        return True

    def result(self) -> None:
        if self._error is not None:
            raise self._error


class SimScheduler:
    """Polls its service whenever something came in, and at its ticks."""

    def __init__(self, world: World, network: Network, config: SchedulerConfig, path: Path) -> None:
        self.world, self.network, self.config, self.journal = world, network, config, path
        self.service: Service | None = None
        self.over = False
        self.verdict: Verdict | None = None
        self.deaths = 0
        self.note: Callable[[str], None] = lambda text: None
        self._paused_until = 0.0
        self._planned = False
        self._life = 0

    @property
    def machine(self) -> Membership | None:
        """The machine, of the last scheduler that lived."""
        return self.service.machine if self.service else None

    def start(self) -> None:
        """The process comes up; a second time with what its journal says."""
        self._life += 1
        self._planned = False
        self._recovery = recovery.begin_or_resume(self.config, self.world, self.journal)
        self.service = Service(
            self.config,
            self.network,
            clock=self.world,
            record=self._record_all,
            recovery=self._recovery,
        )
        check_invariants(self.service.machine)
        self.network.sends_left = None
        self.network.listening = True
        self._turn(self._life)

    def kill(self, *, in_the_middle: bool) -> str | None:
        """
        SIGKILL, now, while it writes its journal, or after a few sends; its agent starts it again
        within 2 s.
        """
        if self.over or not self.network.listening:
            return None
        rng = self.world.random
        if not in_the_middle:
            self._died()
            return "now"
        if rng.random() < 0.5:
            self.network.sends_left = rng.randrange(4)
            return f"after {self.network.sends_left} more sends"
        self._tear()
        return "at its next word to the journal"

    def _tear(self) -> None:
        """
        Have the process die while it writes: what was not acted upon is there in part, or not at
        all.
        """
        keeper = self._recovery._writer
        if keeper is None:
            return
        writer, share = keeper.journal, self.world.random.random()

        def torn() -> None:
            if writer._pending:
                os.write(writer._fd, writer._pending[: int(share * len(writer._pending))])
                raise SchedulerDied

        writer.commit = torn  # type: ignore[method-assign]

    def pause(self, seconds: float) -> str | None:
        """Its process gets no CPU."""
        if self.over or self.world.now < self._paused_until:
            return None
        self._paused_until = self.world.now + seconds
        return f"for {seconds} s"

    def stand_still(self, seconds: float) -> str | None:
        """Its process is stopped; its agent ends it after so many unanswered pings."""
        if self.pause(seconds) is None:
            return None
        patience = MAX_UNANSWERED_PINGS * PING_SECONDS + self.world.random.random() * PING_SECONDS
        self.world.after(patience, self._given_up, self._life)
        return f"for {seconds} s"

    def _given_up(self, life: int) -> None:
        if life == self._life and not self.over and self.world.now < self._paused_until:
            self._paused_until = 0.0
            self._died()

    def wake(self) -> None:
        """Something came in."""
        if not self._planned and self.service is not None and not self.over:
            self._planned = True
            wait = max(0.0, self._paused_until - self.world.now)
            self.world.after(wait, self._woken, self._life)

    def _woken(self, life: int) -> None:
        self._planned = False
        self._poll(life)

    def _turn(self, life: int) -> None:
        if life != self._life or self.service is None or self.over:
            return
        if self.world.now < self._paused_until:
            self.world.after(self._paused_until - self.world.now, self._turn, life)
            return
        self._poll(life)
        if self.service is not None and not self.over:
            self.world.after(self.service.machine.tick_every, self._turn, life)

    def _poll(self, life: int) -> None:
        service = self.service
        if life != self._life or service is None or self.over:
            return
        if self.world.now < self._paused_until:
            self.wake()
            return
        dull = all(
            isinstance(item, EnvelopeArrived) and isinstance(item.envelope.body, Heartbeat)
            for item in self.network.waiting
        )
        try:
            service.poll_once(0.0)
        except SchedulerDied:
            self._died()
            return
        if not dull or self.world.events % 16 == 0:
            check_invariants(service.machine)
        self._see(service.machine)
        if service.exit_code is not None:
            self.over = True
            self.network.process_died()

    def _see(self, machine: Membership) -> None:
        if machine.shutdown.verdict is None:
            return
        if self.verdict is None:
            self.verdict = machine.shutdown.verdict
        assert machine.shutdown.verdict == self.verdict, (
            f"the verdict changed from {self.verdict} to {machine.shutdown.verdict}"
        )

    def _died(self) -> None:
        self.deaths += 1
        self.note("the scheduler has died")
        self._recovery.close()
        self.service = None
        self._life += 1
        self.network.process_died()
        self.world.after(self.world.random.choice((0.2, 0.6, 2.0)), self.start)

    def close(self) -> None:
        """The life is over: leave nothing behind."""
        if self.service is not None:
            self.service.close()
        self.journal.unlink(missing_ok=True)

    def _record_all(self, events: Sequence[LogEvent]) -> None:
        for event in events:
            self._record(event)

    def _record(self, event: LogEvent) -> None:
        self.note(
            f"{event.kind} "
            f"{ {name: value for name, value in event.data.items() if name != 'scheduler'} }"
        )
        if event.kind == "warning" and "connection was refused" in str(event.data.get("text")):
            raise Violation(f"an honest agent broke the protocol: {event.data['text']}")
