"""The time of a successor goes on where the predecessor was; time alone is not written down."""

from __future__ import annotations

from pathlib import Path

from pdrun.clock import FakeClock
from pdrun.rendezvous.journal.file import reopen_journal
from pdrun.rendezvous.journal.recovery import begin_or_resume
from pdrun.rendezvous.protocol.messages import Envelope, Heartbeat, Join, Waiting
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.base import MemoryHub
from tests.rendezvous.helpers import config, hello


def test_time_goes_on_where_the_predecessor_was(tmp_path: Path) -> None:
    """The monotonic clock begins again with a host: a successor must not go back in time."""
    path = tmp_path / "j"

    def serve(clock: FakeClock) -> Service:
        recovery = begin_or_resume(config(nodes=2), clock, path)
        return Service(config(nodes=2), MemoryHub(), clock=clock, recovery=recovery)

    def join(service: Service, agent: str) -> None:
        hub = service.transport
        assert isinstance(hub, MemoryHub)
        end = hub.connect()
        for number, message in enumerate((hello(agent), Join(agent, None, 1, store="h:1"))):
            end.send(Envelope(agent, 0, number, message))
        service.poll_once(0.0)

    first = serve(FakeClock(5000.0))
    join(first, "a")
    first.close()
    second = serve(FakeClock(3.0))
    assert second.machine.state_since >= 5000.0
    join(second, "b")
    second.close()
    journal, history = reopen_journal(path)
    journal.close()
    times = [entry.now for entry in history.entries]
    assert times == sorted(times) and times[-1] >= 5000.0
    assert begin_or_resume(config(nodes=2), FakeClock(7000.0), path).clock_shift == 0.0


def test_a_tick_that_only_tells_who_is_missing_is_not_written(tmp_path: Path) -> None:
    path, clock = tmp_path / "j", FakeClock()
    recovery = begin_or_resume(config(nodes=2), clock, path)
    service = Service(config(nodes=2), MemoryHub(), clock=clock, recovery=recovery)
    hub = service.transport
    assert isinstance(hub, MemoryHub)
    end = hub.connect()
    for number, message in enumerate((hello("a"), Join("a", None, 1, store="h:1"))):
        end.send(Envelope("a", 0, number, message))
    service.poll_once(0.0)
    end.take_envelopes()
    size = path.stat().st_size
    for number in range(1, 25):
        clock.advance(0.5)
        end.send(Envelope("a", 0, 0, Heartbeat(number, number - 1)))
        service.poll_once(0.0)
    assert any(isinstance(each.body, Waiting) for each in end.take_envelopes())
    assert path.stat().st_size == size
    service.close()
