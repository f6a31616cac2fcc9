"""A scheduler process on loopback, ended with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdrun import eventlog
from pdrun.endpoint import Endpoint
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.child import SchedulerChild

from .helpers import config

LOOPBACK = Endpoint("127.0.0.1", 0)


class Scheduler(SchedulerChild):
    """A SchedulerChild that can read its own event log."""

    def __init__(
        self, secret: Secret | None, events: Path, endpoint: Endpoint = LOOPBACK, **changes: Any
    ) -> None:
        self.secret, self.events_path = secret, events
        options = {key: changes.pop(key) for key in ("insecure", "journal") if key in changes}
        super().__init__(
            config(**changes), secret, endpoint=endpoint, events_path=events, **options
        )

    def events(self, kind: str = "") -> list[eventlog.LogEvent]:
        found = list(eventlog.read_events(self.events_path)) if self.events_path.exists() else []
        return [event for event in found if kind in ("", event.kind)]


@pytest.fixture
def secret() -> Secret:
    return Secret.random()


@pytest.fixture
def scheduler(secret: Secret, tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    """Start a scheduler process: ``scheduler(nodes=2, grace=1.0)``."""
    started: list[Scheduler] = []

    def start(**changes: Any) -> Scheduler:
        changes.setdefault("secret", secret)
        started.append(
            Scheduler(changes.pop("secret"), tmp_path / f"events-{len(started)}.jsonl", **changes)
        )
        return started[-1]

    yield start
    for child in started:
        child.close(0.2)
