"""
An agent as `pdrun.launcher.agent.agent` behaves, over the simulated network, with workers that are
only numbers.

It uses the product's own `ResendBuffer` and `DuplicateFilter`, so that what is repeated after a cut
is what real agents repeat, and its own `FenceTimer`: a supervisor that goes on while its agent
stands still ends the workers when that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdrun.launcher.agent.shutdown import ShutdownState
from pdrun.launcher.stdlib_only.watchdog import FENCE_DELAY_SECONDS, RECHECK_SECONDS
from pdrun.launcher.supervisor.client import MAX_UNANSWERED_PINGS, PING_SECONDS
from pdrun.rendezvous.protocol.messages import (
    PROTOCOL,
    Assign,
    Cause,
    CauseKind,
    Depart,
    Echo,
    Envelope,
    Finished,
    Heartbeat,
    Hello,
    Hung,
    Join,
    Leave,
    Message,
    Progress,
    Ready,
    Refuse,
    ShowStacks,
    StackGroup,
    Stacks,
    Start,
    Step,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.transport.resend import DuplicateFilter, FenceTimer, ResendBuffer
from pdrun.rendezvous.transport.zmq_client import GRANT_SECONDS

from .network import Connection, Network
from .world import World

RETRY = 0.3
ASK_AGAIN = 1.0
"""Seconds after which an agent asks again in whose place an earlier one may have ended."""
KILL = 0.2
"""Seconds in which SIGKILL ends every worker of a node and what they had started."""
ASK = 1.5
"""
Seconds in which an agent that stood still must hear the scheduler again, should its lease be over.
"""


@dataclass
class Job:
    """What the workers do, and what the agents are told on their command lines."""

    name: str = "job"
    run: str = "run"
    work: int = 40
    """Steps until a worker is done; one a second."""
    save_every: int = 5
    grace: float = 2.0
    obey: float = 1.0
    """Share of SIGTERMs that end a worker at once; others take their time, some until SIGKILL."""
    elastic: bool = False
    hang_timeout: float = 20.0


@dataclass
class Run:
    """The workers of one node in one generation: what a judge may look at."""

    agent: SimAgent
    assign: Assign
    began: float
    ended: float | None = None
    living: dict[int, int] = field(default_factory=dict)
    """rank -> the step that it began with"""
    exits: dict[int, Cause] = field(default_factory=dict)
    stopping: bool = False
    hung: set[int] = field(default_factory=set)
    saved: int = -1
    fenced: tuple[int, ...] | None = None
    """The ranks that the supervisor or the watchdog has ended, until the agent knows."""


class SimAgent:
    """One agent process on one node."""

    def __init__(
        self,
        world: World,
        network: Network,
        job: Job,
        node: str,
        workers: int,
        told: Callable[[Run], None],
        node_rank: int | None = None,
    ) -> None:
        self.world, self.network, self.job = world, network, job
        self.node, self.workers, self.node_rank = node, workers, node_rank
        self.told = told
        self.frozen = self.dead = False
        self.whole = True
        """While frozen: every process of the node stands still, not the agent alone."""
        self.still_until = 0.0
        """Until when the supervisor stands still."""
        self.until: float | None = None
        """The fence that the supervisor has read last."""
        self.sent_fence: float | None = None
        """The fence of the last ping, which a supervisor that stands still has not read."""
        self.recheck_until = 0.0
        self.code: int | None = None
        self.verdict: Verdict | None = None
        self.fenced = self.departing = False
        self.runs: list[Run] = []
        self.unready: str = ""
        self.refusal: str = ""
        self.born = world.now
        self.frozen_at = 0.0
        self._paused: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._new_identity()
        self._connect()

    @property
    def name(self) -> str:
        return self.agent

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return not self.dead and self.code is None

    @property
    def run(self) -> Run | None:
        """The present generation's workers."""
        return self.runs[-1] if self.runs else None

    def _new_identity(self) -> None:
        self.agent = f"{self.world.random.getrandbits(128):032x}"
        self.incarnation = -1
        self.memory, self.filter = ResendBuffer(), DuplicateFilter()
        self.connection: Connection | None = None
        self.up = False
        self.welcome: Welcome | None = None
        self.assign: Assign | None = None
        self.started = self.finished = False
        self.fence = FenceTimer(self.world.now)
        self.shutdown = ShutdownState()
        self.echo = self.beats = 0
        self.answered = self.read_at = self.world.now
        self.doubt = 0
        """
        Held back until an answer to the heartbeat of this number: what came after a silence may be
        long past.
        """
        self.held: list[Message] = []
        self.lost_at: float | None = None
        self.reset_at = float("-inf")

    # Time
    # ----

    def later(self, delay: float, act: Callable[..., None], *arguments: object) -> None:
        """Plan something of this process's own: not while it is frozen, never after its death."""
        self.world.after(delay, self._do, act, arguments)

    def _do(self, act: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._paused.append((act, arguments))
        else:
            act(*arguments)

    def freeze(self, seconds: float) -> None:
        """Every process of the node stands still."""
        if self.alive and not self.frozen:
            self.frozen, self.whole, self.frozen_at = True, True, self.world.now
            self.network.watch(self.node)
            self.world.after(seconds, self._thaw)

    def stop_agent(self, seconds: float) -> None:
        """The agent alone stands still (SIGSTOP); its supervisor and workers go on."""
        if self.alive and not self.frozen:
            self.freeze(seconds)
            self.whole = False
            self._watch_fence(self.run)

    def stop_supervisor(self, seconds: float) -> None:
        """The supervisor stands still; the agent gives it up after so many unanswered pings."""
        self.still_until = self.world.now + seconds
        self.later(self._draw_patience(), self._give_supervisor_up, self.run)

    def _draw_patience(self) -> float:
        return MAX_UNANSWERED_PINGS * PING_SECONDS + self.world.random.random() * PING_SECONDS

    def _give_supervisor_up(self, run: Run | None) -> None:
        """It is killed, and only when its workers have ended, they are reported."""
        if run and run.ended is None and self.world.now < self.still_until:
            self.still_until = self.world.now
            self._end_at_once(run)
            self.later(KILL, self._report_lost, run)

    def _thaw(self) -> None:
        self.frozen = False
        if not self.alive:
            return
        if self.whole:
            self.recheck_until = self.world.now + RECHECK_SECONDS
        self._watch_fence(self.run)
        if self.run and self.run.fenced:
            self.later((self.run.ended or 0.0) - self.world.now, self._learn_of_fence, self.run)
        if self.welcome:  # its lease has run on; a moment to ask whether it is still in
            self.answered = max(self.answered, self.world.now - self.welcome.lease + ASK)
        paused, self._paused = self._paused, []
        for act, arguments in paused:
            self._do(act, arguments)
        if self.connection and self.connection.here and not self.connection.there:
            self.connection.here = False
            self.disconnected(self.connection)

    def die(self, *, silently: bool) -> None:
        """The agent is killed, or its machine loses power; its workers end with it."""
        self.dead = True
        self._all_end()
        if self.connection:
            self.network.client_gone(self.connection, silently=silently)

    def _exit(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self._all_end()
            if self.connection:
                self.network.client_gone(self.connection)

    # The link
    # --------

    def _connect(self) -> None:
        if self.connection and self.connection.here:
            return None
        connection = self.network.connect(self)
        if connection is None:
            patience = self.welcome.patience if self.welcome else 600.0
            self.lost_at = self.world.now if self.lost_at is None else self.lost_at
            if self.world.now - self.lost_at > patience:
                return self._give_up()
            return self.later(RETRY, self._connect)
        self.lost_at = None
        self.fence.on_connected(self.world.now + GRANT_SECONDS)
        self.fence.on_hello(self.world.now)
        self.connection, self.up, self.sequence = connection, False, 0
        self.doubt, self.held = 0, []
        self.incarnation += 1
        self._put(
            Hello(PROTOCOL, "agent", self.job.name, self.agent, self.incarnation, self.node, 1)
        )
        return None

    def _give_up(self) -> None:
        """No scheduler for too long."""
        self._stop_run(0.0)
        self.later(KILL, self._exit, 69)

    def _put(self, message: Message) -> None:
        if self.connection and self.connection.here:
            counted = not isinstance(message, Heartbeat)
            sequence = self.sequence if counted else 0
            self.network.client_send(
                self.connection, Envelope(self.agent, self.incarnation, sequence, message)
            )
            self.sequence += counted

    def say(self, message: Message) -> None:
        """Send, now or after the next reconnection."""
        self.memory.add_message(message)
        if self.up:
            self._put(message)

    def disconnected(self, connection: Connection) -> None:
        """The network: a connection is over."""
        if connection is self.connection and self.alive:
            self.up = False
            self.later(RETRY * self.world.random.random(), self._connect)

    def arrived(self, connection: Connection, envelope: Envelope) -> None:
        """The network: a message came."""
        if connection is self.connection:
            self._do(self._take, (envelope.body,))

    def _beat(self, connection: Connection) -> None:
        if connection is self.connection and connection.here and self.welcome:
            self.beats += 1
            beat = Heartbeat(self.beats, self.echo)
            self.fence.on_heartbeat(beat, self.welcome.heartbeat or 1.0, self.world.now)
            self._put(beat)
            lease = self.welcome.lease
            if lease and self.world.now - self.answered > lease:
                self._lease_ends()
            self.later(self.welcome.heartbeat or 1.0, self._beat, connection)

    def _watch_lease(self) -> None:
        """While cut, nothing beats: the lease is watched all the same."""
        if self.welcome and self.welcome.lease:
            if self.world.now - self.answered > self.welcome.lease:
                self._lease_ends()
            self.later(0.5, self._watch_lease)

    def _lease_ends(self) -> None:
        run = self.run
        if run and run.ended is None and not run.stopping and self.started:
            self._stop_run(0.0)

    # What it is told
    # ---------------

    def _take(self, message: Message) -> None:
        silence, self.read_at = self.world.now - self.read_at, self.world.now
        if self.welcome and self.welcome.lease and silence > self.welcome.lease and not self.doubt:
            self.doubt = self.beats + 1
        if not self.doubt or (isinstance(message, Echo) and message.number >= self.doubt):
            self.answered = self.world.now
        if isinstance(message, Echo):
            self.fence.on_echo(message.number)
            self.echo = max(self.echo, message.number)
            if self.doubt and self.echo >= self.doubt:
                self.doubt = 0
                held, self.held = self.held, []
                for each in held:
                    self._take(each)
            return
        if self.doubt and not isinstance(message, Refuse | Welcome):
            self.held.append(message)
            return
        if isinstance(message, Welcome):
            if not self.up:
                self.up = True
                self.fence.on_welcome()
                self.shutdown.set_lease(message, is_scheduler_node=False)
                first, self.welcome = self.welcome is None, message
                if first:
                    self._watch_lease()
                for again in self.memory.messages_to_repeat():
                    self._put(again)
                self._beat(self.connection)  # type: ignore[arg-type]
        elif isinstance(message, Assign):
            self.memory.forget_before(message.generation)
        if self.filter.is_new(message):
            self._heard(message)

    def _heard(self, message: Message) -> None:
        match message:
            case Welcome():
                self.say(Join(self.node, self.node_rank, self.workers, {}, f"{self.node}:1"))
            case Assign():
                self._assigned(message)
            case Start(generation) if (
                self.assign and self.assign.generation == generation and not self.started
            ):
                self._start(self.assign)
            case StopWorkers(generation, _, grace, _):
                if self.started and self.run and self.run.assign.generation == generation:
                    self._stop_run(grace)
            case ShowStacks(generation) if self.world.random.random() < 0.8:
                ranks = tuple(self.run.living) if self.run else ()
                self.say(Stacks(generation, (StackGroup(ranks, "somewhere"),) if ranks else ()))
            case Refuse(code, reason, rejoin, retry):
                self.refusal = "" if rejoin or retry else reason
                self._refused(code, rejoin or retry, ASK_AGAIN if retry else 0.0)
            case Verdict():
                self.verdict = message
                self.shutdown.has_verdict = True
                self._stop_run(self.job.grace)
                self._leave_when_done(message.code)
            case _:
                pass

    def _assigned(self, assign: Assign) -> None:
        if self.assign is not None and assign.generation <= self.assign.generation:
            return
        self.assign, self.started, self.finished = assign, False, False
        if self.unready:
            self.later(0.05, self.say, Unready(assign.generation, 78, self.unready))
        else:
            self.later(self.world.random.random() * 0.5, self.say, Ready(assign.generation))

    def _refused(self, code: int, rejoin: bool, wait: float) -> None:
        self.fenced = self.fenced or rejoin
        self.up = False
        if self.connection:
            self.network.client_gone(self.connection)
        self._stop_run(0.0)
        self.later(
            wait + KILL + 0.05,
            self._rejoin if rejoin else self._exit,
            self.agent if rejoin else code or 69,
        )

    def _rejoin(self, agent: str) -> None:
        if agent != self.agent:
            return  # it has rejoined for another reason
        if self.run and (self.run.ended is None or self.run.ended > self.world.now):
            self.later(0.05, self._rejoin, agent)  # no worker of the old member is left first
            return
        self._new_identity()
        self._connect()

    def _leave_when_done(self, code: int) -> None:
        if self.run is None or self.run.ended is not None:
            self.say(Leave())
            self.later(0.01, self._exit, code)
        else:
            self.later(0.1, self._leave_when_done, code)

    # Workers
    # -------

    def _start(self, assign: Assign) -> None:
        self.started = True
        ranks = range(assign.first_rank, assign.first_rank + self.workers)
        run = Run(self, assign, self.world.now, living=dict.fromkeys(ranks, assign.agreed_step + 1))
        self.runs.append(run)
        self._ping(run)
        if self.world.now < self.still_until:
            self.later(self._draw_patience(), self._give_supervisor_up, run)
            self.world.after(self.still_until - self.world.now, self._begin, run)
        else:
            self._begin(run)

    def _begin(self, run: Run) -> None:
        """The supervisor starts the workers, as soon as it runs; its agent may stand still."""
        if self.frozen and self.whole:
            self._paused.append((self._begin, (run,)))
            return
        if run.ended is not None or not self.alive:
            return
        run.began, self.until = self.world.now, self.sent_fence
        self._watch_fence(run)
        if run.ended is not None:
            return
        self.told(run)
        left = max(1, self.job.work - run.assign.agreed_step - 1)
        for rank in list(run.living):
            self.later(
                left + self.world.random.random() * 0.2, self._ends, run, rank, Cause("ok", 0)
            )
        self.later(self.job.save_every, self._report, run)

    def _report(self, run: Run) -> None:
        if run is self.run and run.living and not run.stopping:
            steps = {
                rank: first + int(self.world.now - run.began) for rank, first in run.living.items()
            }
            if not run.hung and not run.exits:
                run.saved = min(steps.values()) - min(steps.values()) % self.job.save_every
            told = tuple(Step(rank, step) for rank, step in steps.items() if rank not in run.hung)
            self.say(Progress(run.assign.generation, told, run.saved))
            self.later(self.job.save_every, self._report, run)

    def fail(self, rank: int, kind: CauseKind, code: int) -> None:
        """A worker of the present generation ends badly."""
        run = self.run
        if run and run.ended is None and self.alive:
            self._do(
                self._ends,
                (run, rank, Cause(kind, code, summary=f"{kind} {code}", at=self.world.now)),
            )

    def hang(self, rank: int) -> None:
        """
        A worker of the present generation stands still; its node notices after the hang timeout.
        """
        run = self.run
        if run and rank in run.living and self.alive:
            run.hung.add(rank)
            self.later(self.job.hang_timeout, self._notice_hang, run, rank)

    def _notice_hang(self, run: Run, rank: int) -> None:
        if rank in run.living and not run.stopping:
            self.say(Hung(run.assign.generation, rank, "no progress"))

    def _ends(self, run: Run, rank: int, cause: Cause) -> None:
        if rank not in run.living or (rank in run.hung and cause.kind == "ok"):
            return
        del run.living[rank]
        if run.stopping and cause.kind == "ok":
            cause = Cause("stopped", 143, 15)
        run.exits[rank] = cause
        self.say(WorkerExit(run.assign.generation, rank, cause))
        if not run.living:
            self._all_ended(run)

    def _all_ended(self, run: Run) -> None:
        run.ended = self.world.now if run.ended is None else run.ended
        self.finished = True
        self.say(Finished(run.assign.generation, f"{self.node}:{run.assign.generation + 2}"))
        if self.departing:
            self.say(Leave("departed"))
            self.later(0.05, self._exit, 143)

    # The supervisor
    # --------------

    def _ping(self, run: Run) -> None:
        """Show the supervisor until when the workers may run."""
        if run is not self.run or run.ended is not None or self.welcome is None:
            return
        at = self.shutdown.fence_at(self.fence.fence_at(self.welcome.dead), self.world.now)
        self.sent_fence = at
        if self.world.now >= self.still_until:
            self.until = at
        if at is not None and at < self.world.now + PING_SECONDS:
            self._watch_fence(run)
        self.later(PING_SECONDS, self._ping, run)

    def _watch_fence(self, run: Run | None) -> None:
        """Look at the fence when it may be over: a process of its own, whatever the agent does."""
        if run is None or run.ended is not None or self.until is None or self.dead:
            return
        at = max(self.until, self.recheck_until)
        if self.world.now < self.still_until:
            at += FENCE_DELAY_SECONDS
        if self.world.now < at - 1e-6:
            self.world.after(at - self.world.now, self._watch_fence, run)
        elif run is self.run and self.code is None and not (self.frozen and self.whole):
            self._end_at_once(run)  # its connection to the agent closes after that
            self.later(KILL, self._learn_of_fence, run)

    def _end_at_once(self, run: Run) -> None:
        """Every worker of the node is killed, and nothing of it is reported yet."""
        run.fenced = tuple(run.living)
        run.ended = self.world.now + KILL
        run.living.clear()

    def _learn_of_fence(self, run: Run) -> None:
        if not run.fenced or run is not self.run:
            return
        if self.welcome and self.welcome.lease and not self.departing and self.verdict is None:
            run.fenced = None
            self.up = False
            if self.connection:
                self.network.client_gone(self.connection)
            self.later(0.05, self._rejoin, self.agent)
        else:
            self._report_lost(run)

    def _report_lost(self, run: Run) -> None:
        if run.fenced is None:  # the agent has stood still meanwhile, and knows already
            return
        ranks, run.fenced = run.fenced, None
        for rank in ranks:
            run.exits[rank] = Cause("lost", 137, 9, at=self.world.now)
            self.say(WorkerExit(run.assign.generation, rank, run.exits[rank]))
        self._all_ended(run)

    def _stop_run(self, grace: float) -> None:
        run = self.run
        if run is None or run.ended is not None:
            return
        if self.world.now < self.still_until:  # nobody passes the signal on before that
            self.later(self.still_until - self.world.now, self._stop_run, grace)
            return
        first = not run.stopping
        run.stopping = True
        for rank in list(run.living):
            obeys = self.world.random.random() < self.job.obey and rank not in run.hung
            delay = KILL if grace == 0 else 0.05 if obeys else min(grace, 10.0) + KILL
            if first or grace == 0:
                self.later(delay, self._ends, run, rank, Cause("stopped", 143, 15))

    def _all_end(self) -> None:
        run = self.run
        if run and run.ended is None:
            run.ended = self.world.now + KILL
            run.living.clear()

    # What its user does
    # ------------------

    def depart(self) -> None:
        """SIGTERM at an agent of an elastic job."""
        if not self.alive or self.departing:
            return
        self.departing = True
        if self.run and self.run.ended is None:
            self.say(Depart("its machine is taken away"))
        else:
            self.say(Leave("its machine is taken away"))
            self.later(0.05, self._exit, 143)

    def stop(self) -> None:
        """Ctrl-C."""
        if self.alive:
            self.say(StopRequest(2, f"SIGINT on {self.node}"))
