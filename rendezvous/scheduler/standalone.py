"""A scheduler in the foreground: `pdrun scheduler`, and the scheduler of a dynamic cluster."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pdrun import async_writer, process_setup
from pdrun.clock import SystemClock
from pdrun.endpoint import Endpoint
from pdrun.eventlog import EventLog, LogEvent
from pdrun.rendezvous.journal.recovery import begin_or_resume
from pdrun.rendezvous.policies.texts import start_instructions
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.scheduler.service import Service
from pdrun.text import plural

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.security import Secret


def serve_standalone(
    config: SchedulerConfig,
    secret: Secret | None,
    endpoint: Endpoint,
    *,
    insecure: bool = False,
    events_path: Path | None = None,
    show_line: Callable[[str], None] | None = None,
    how_to_join: str = "",
    journal: Path | None = None,
) -> int:
    """
    Serve one job in the foreground (`pdrun scheduler`) and return its exit code.

    SIGINT and SIGTERM stop the job; a second signal stops it without grace. ``show_line`` gets
    lines for the user and must not block (default: stderr); ``how_to_join`` is one of them. With
    ``journal``, a scheduler that died is resumed by starting it again at the same address. The file
    is removed when the job is over.
    """
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    show_line = show_line or async_writer.write_message
    recovery = begin_or_resume(config, SystemClock(), journal, events_path)
    transport = ZmqServer(
        secret, endpoint=endpoint, insecure=insecure, crowd=config.nodes + config.spares
    )
    log = EventLog(events_path) if events_path else None

    def record(events: Sequence[LogEvent]) -> None:
        if log:
            log.extend(events)
        for event in events:
            if event.kind not in ("created", "assigned", "exited", "verdict"):
                show_line(_format_event(event))

    service = Service(config, transport, record=record, recovery=recovery)
    if recovery.is_resumed:
        show_line(f"resuming from {journal}")
    named = f"job '{config.job}'" if config.job else "the first job that connects"
    awaited = plural(config.nodes, config.unit)
    show_line(
        f"scheduler of {named} (run {config.run}) on {transport.endpoint}, waiting for {awaited}"
    )
    show_line(how_to_join or start_instructions(config, transport.endpoint, insecure=insecure))
    if insecure:
        show_line("INSECURE: no token is required; every process that reaches this port can join")
    signals: list[int] = []
    restore = _catch_signals(signals)
    stops = 0
    try:
        while service.exit_code is None:
            service.poll_once(0.2)
            while signals:
                where = f"a signal at the scheduler{' on ' + config.host if config.host else ''}"
                service.stop_job(signals.pop(0), where, force=stops > 0)
                stops += 1
        service.finish()
    finally:
        restore()
        service.close()
        transport.close(1.0)
        if log and (missing := log.close()):
            show_line(missing)
    verdict = service.machine.shutdown.verdict
    if verdict and verdict.code:
        show_line(f"job ended with code {verdict.code}: {verdict.reason}")
    async_writer.flush_messages()
    return service.exit_code


def _format_event(event: LogEvent) -> str:
    data = event.data
    parts = [str(data[key]) for key in ("node", "host", "text", "reason") if data.get(key)]
    if parts:
        return f"{event.kind}: {', '.join(dict.fromkeys(parts))}"
    return event.kind


def _catch_signals(signals: list[int]) -> Callable[[], None]:
    """
    Collect SIGINT and SIGTERM in ``signals``; return a function that restores the old handlers.
    """

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us watches signals
        return lambda: None

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, process_setup.handler_after(handler))  # type: ignore[arg-type]

    return restore
