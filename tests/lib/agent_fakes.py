"""A keeper, an output and a scheduler's link that do nothing but remember, and a hand-made plan."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Sequence

from pdrun.endpoint import Endpoint
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Output, Policy, Program, Resources
from pdrun.launcher.plan.model import LaunchPlan, WorkerPlan
from pdrun.launcher.supervisor.events import SupervisorEvent, WorkerCommand
from pdrun.rendezvous.protocol.messages import Assign, Message


class FakeSupervisor:
    """Remembers what it was asked; hands out what a test gave to `add`."""

    def __init__(self) -> None:
        self.commands: dict[int, WorkerCommand] = {}
        self.signals: list[tuple[int, int, bool]] = []
        self.sweeps: list[int | None] = []
        self.queue: list[SupervisorEvent] = []
        self.closed = False
        self.prepared: list[WorkerCommand] = []
        self.dismissed = False
        self.fences: list[float | None] = []
        self.failure: Exception | None = None
        self._event_fd: int | None = None
        """Made when somebody wants to wait: simulations have a thousand of these."""

    def fileno(self) -> int:
        if self._event_fd is None:
            self._event_fd = os.eventfd(0, os.EFD_NONBLOCK)
            self._close_event_fd = weakref.finalize(self, os.close, self._event_fd)
        return self._event_fd

    def add_events(self, *events: SupervisorEvent) -> None:
        """Have events handed out, and wake who waits for them."""
        self.queue += events
        if events:
            os.eventfd_write(self.fileno(), 1)

    def spawn(
        self,
        command: WorkerCommand,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.commands[command.slot] = command

    def start_fork_server(self, command: WorkerCommand) -> None:
        self.prepared.append(command)

    def release_fork_server(self) -> None:
        self.dismissed = True

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        self.signals.append((slot, int(number), group))

    def sweep_descendants(self, slot: int | None) -> None:
        self.sweeps.append(slot)

    def read_events(self) -> Iterable[SupervisorEvent]:
        if self.failure is not None:
            raise self.failure
        if self.queue:
            os.eventfd_read(self.fileno())
        found, self.queue = self.queue, []
        return found

    def send_ping(self, fence_at: float | None = None) -> float | None:
        self.fences.append(fence_at)
        return None

    def lift_fence(self) -> None:
        self.fences.append(None)

    def close(self) -> None:
        if self._event_fd is not None:
            self._close_event_fd()
        self.closed = True


class FakeOutput:
    """Holds what the workers are supposed to have printed."""

    def __init__(self) -> None:
        self.tails: dict[int, tuple[str, ...]] = {}
        self.traces: dict[int, tuple[float, str]] = {}
        self.survivors: set[int] = set()
        self.output_times: dict[int, float] = {}
        self.printed_lines: list[str] = []
        self.revealed: list[int] = []
        self.drained: list[int] = []
        self.begun: list[tuple[str, int]] = []

    def prepare_folder(self) -> None: ...

    def begin_generation(self, run: str, world_size: int) -> None:
        self.begun.append((run, world_size))

    def open_pipes(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def watched_fds(self) -> Iterable[int]:
        return ()

    def read_pipe(self, fd: int) -> None: ...

    def drain_worker(self, rank: int, timeout: float) -> None:
        self.drained.append(rank)

    def last_lines(self, rank: int) -> tuple[str, ...]:
        return self.tails.get(rank, ())

    def recent_stderr(self, rank: int) -> str:
        return "\n".join(self.last_lines(rank))

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        return self.traces.get(rank)

    def has_survived(self, rank: int) -> bool:
        return rank in self.survivors

    def last_output_at(self, rank: int) -> float:
        return self.output_times.get(rank, 0.0)

    def log_path(self, rank: int) -> str:
        return f"/logs/rank_{rank}.err"

    def show_hidden_tail(self, rank: int) -> None:
        self.revealed.append(rank)

    def print_line(self, text: str) -> None:
        self.printed_lines.append(text)

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        return ()


class FakeLink:
    """Hands out what a test puts into `inbox`; an exception there is raised."""

    def __init__(self, *inbox: Message | Exception) -> None:
        self.inbox: list[Message | Exception] = list(inbox)
        self.sent: list[Message] = []
        self.silence, self.renewed = 0.0, 0
        self.read, self._write = os.pipe()
        self._close_pipe = [weakref.finalize(self, os.close, fd) for fd in (self.read, self._write)]
        self.closed = False

    def fileno(self) -> int:
        return self.read

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def poll(self) -> Sequence[Message]:
        found = []
        while self.inbox:
            item = self.inbox.pop(0)
            if isinstance(item, Exception):
                raise item
            found.append(item)
        return found

    def deadline(self) -> float | None:
        return 0.0

    def silent_for(self) -> float:
        return self.silence

    def cut_off_for(self) -> float:
        return self.silence

    def fence_at(self) -> float:
        return time.monotonic() + 9.0 - self.silence

    def renew(self) -> None:
        self.renewed += 1

    def close(self, timeout: float = 1.0) -> None:
        for close in self._close_pipe:
            close()
        self.closed = True


def make_plan(
    workers: int = 2,
    *,
    argv: tuple[str, ...] = ("/bin/true",),
    kind: str = "command",
    cwd: str = "/",
    nodes: int = 1,
    grace: float = 30.0,
    max_restarts: int = 0,
    env: dict[str, str] | None = None,
    files: bool = False,
    node_rank: int | None = None,
    job: str = "demo",
    log_dir: str = "logs",
) -> LaunchPlan:
    """A plan as `plan.plan` would make it, of a command that needs no torch."""
    program = Program(
        kind, argv[0] if kind == "command" else argv[1], argv[1:] if kind == "command" else argv[2:]
    )  # type: ignore[arg-type]
    spec = JobSpec(
        program,
        Resources(nodes=nodes, devices=workers),
        Policy(grace=grace, max_restarts=max_restarts),
        Output(files=files, log_dir=log_dir),
        ClusterOptions(node_rank=node_rank),
        job=job,
        env=env or {},
    )
    return LaunchPlan(
        mode="single" if nodes == 1 else "join",
        job=job,
        node="node0",
        nodes=nodes,
        spec=spec,
        sources={},
        workers=tuple(WorkerPlan(rank, argv, None, (), 1) for rank in range(workers)),
        backend="cpu",
        backend_reason="",
        visibility={},
        collective="gloo",
        base_env=dict(os.environ),
        removed=(),
        scheduler=None if nodes == 1 else Endpoint("127.0.0.1", 1),
        listen="127.0.0.1",
        cwd=cwd,
    )


def make_assign(
    world: int = 2, *, generation: int = 0, first: int = 0, nodes: int = 1, restarts: int = 0
) -> Assign:
    """A place for node 0."""
    return Assign(generation, 0, nodes, first, world, restarts, "127.0.0.1:4000")
