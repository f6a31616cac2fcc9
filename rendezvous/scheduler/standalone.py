"""
A scheduler that stands by itself, in the foreground: `pdrun scheduler`, and the scheduler of a
dynamic cluster.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pdrun import async_writer as lane
from pdrun import process_setup as early
from pdrun.clock import SystemClock
from pdrun.endpoint import Endpoint
from pdrun.eventlog import Event, EventLog
from pdrun.rendezvous.journal.recovery import enter
from pdrun.rendezvous.policies.texts import count, how_to_start
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.scheduler.service import Service

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.security import Secret


def serve_standalone(
    config: SchedulerConfig,
    secret: Secret | None,
    endpoint: Endpoint,
    *,
    insecure: bool = False,
    events_path: Path | None = None,
    say: Callable[[str], None] | None = None,
    how_to_join: str = "",
    journal: Path | None = None,
) -> int:
    """
    Serve one job in the foreground (`pdrun scheduler`) and return its code.

    SIGINT and SIGTERM stop the job, a second one at once. ``say`` gets lines for the user and must
    not block, stderr by default; ``how_to_join`` is one of them. With ``journal`` a scheduler that
    died is resumed by starting it again, at the same address; the file goes when the job is over.
    """
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    say = say or lane.say
    recovery = enter(config, SystemClock(), journal, events_path)
    transport = ZmqServer(
        secret, endpoint=endpoint, insecure=insecure, crowd=config.nodes + config.spares
    )
    log = EventLog(events_path) if events_path else None

    def record(events: Sequence[Event]) -> None:
        if log:
            log.extend(events)
        for event in events:
            if event.kind not in ("created", "assigned", "exited", "verdict"):
                say(_shown(event))

    service = Service(config, transport, record=record, recovery=recovery)
    if recovery.resumed:
        say(f"resuming from {journal}")
    named = f"job '{config.job}'" if config.job else "the first job that comes"
    awaited = count(config.nodes, config.unit)
    say(f"scheduler of {named} (run {config.run}) on {transport.endpoint}, waiting for {awaited}")
    say(how_to_join or how_to_start(config, transport.endpoint, insecure=insecure))
    if insecure:
        say(
            "INSECURE: no token is asked for; anybody who reaches this port can take part in the job"
        )
    signals: list[int] = []
    restore = _catch(signals)
    stops = 0
    try:
        while service.done is None:
            service.poll_once(0.2)
            while signals:
                where = f"a signal at the scheduler{' on ' + config.host if config.host else ''}"
                service.stop(signals.pop(0), where, force=stops > 0)
                stops += 1
        service.finish()
    finally:
        restore()
        service.close()
        transport.close(1.0)
        if log and (missing := log.close()):
            say(missing)
    verdict = service.machine.verdict
    if verdict and verdict.code:
        say(f"job ended with code {verdict.code}: {verdict.reason}")
    lane.flush()
    return service.done


def _shown(event: Event) -> str:
    data = event.data
    parts = [str(data[key]) for key in ("node", "host", "text", "reason") if data.get(key)]
    if parts:
        return f"{event.kind}: {', '.join(dict.fromkeys(parts))}"
    return event.kind


def _catch(signals: list[int]) -> Callable[[], None]:
    """Collect SIGINT and SIGTERM in ``signals``; return what puts the old handlers back."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us watches signals
        return lambda: None

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, early.afterwards(handler))  # type: ignore[arg-type]

    return restore
