"""
The words that agents and the scheduler exchange: frozen dataclasses, one a message, plain values
only.

A conversation, agent on the left:

    Hello            ->                 who I am, which job I mean
                     <-  Welcome        this is the run, this is its specification   (or Refuse)
    Join             ->                 my node, my workers, my facts, my store address
                     <-  Waiting        every few seconds: who is here, who is missing
                     <-  Assign         generation, my place in it, where rank 0's store is
    Ready            ->                 I can start (or: Unready, why not)
                     <-  Start          everybody can
    WorkerExit       ->                 one a worker, with its cause
                     <-  StopWorkers    somebody failed, or was stopped: end yours
    Finished         ->                 all my workers of this generation have ended
                     <-  Assign         the next generation ...
                     <-  Verdict        ... or the end: one code for every node
    Leave            ->

A node that joins a job which has its nodes gets Standby and waits for a later generation. One that
must go (its machine is to be taken away) says Depart, ends its workers as for a restart, and
leaves; the others form a new generation.

Heartbeat and Echo run beside it, and Progress, which carries what the workers told
(`pdrun.progress`). A worker that hangs is reported by Hung; the scheduler asks all nodes for their
workers' stacks (ShowStacks, Stacks) before it ends the generation. Notice is a line for the people
at the terminals. StopRequest and StatusQuery come from agents and from viewers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

PROTOCOL = 2
"""Version of this file; two sides with different versions refuse each other by name."""

Role = Literal["agent", "view"]
CauseKind = Literal[
    "ok",
    "exception",
    "signal",
    "oom",
    "exit",
    "communication",
    "startup",
    "lost",
    "suspect",
    "stopped",
    "hang",
]


@dataclass(frozen=True)
class Cause:
    """Why one worker ended, as its agent saw it."""

    kind: CauseKind
    """
    ok: exit code 0. exception: a Python traceback was its last word. signal, oom: killed. exit: a
    code without a traceback. communication: an exception or abort whose text says that a peer went
    away. startup: could not be started. lost: its node was lost. suspect: a traceback was its last
    word, but it still ran when pdrun stopped it. stopped: ended after pdrun told it to. hang: made
    no progress for the hang timeout.
    """
    code: int
    """
    As a shell shows it: the exit code, ``128 + N`` for signal N, 126 or 127 when it could not be
    started.
    """
    signal: int = 0
    at: float = 0.0
    """
    Monotonic seconds on the worker's node at which the cause was first seen (first byte of the last
    traceback, else the exit): comparable inside a node only.
    """
    summary: str = ""
    """One line: ``ValueError: boom``, ``killed by SIGSEGV (segmentation fault)``."""
    traceback: str = ""
    """The user's traceback, at most 64 KiB of its end; empty when there is none."""
    tail: tuple[str, ...] = ()
    """The last lines that the worker printed (at most 20, each at most 500 characters)."""
    log: str = ""
    """Path of the worker's error log on its node."""
    retry: bool = True
    """False when another attempt cannot help: script missing, SyntaxError, not executable."""


@dataclass(frozen=True)
class Failure:
    """A cause with the place where it happened."""

    rank: int
    node: str
    cause: Cause


@dataclass(frozen=True)
class Hello:
    """First word on every connection; anything else before it is refused."""

    version: int
    role: Role
    job: str
    """
    The job that the sender means; the empty string in a viewer's or joiner's hello means: whichever
    you serve.
    """
    agent: str
    """Random name of the sending process, 32 hexadecimal digits; stays over reconnects."""
    incarnation: int
    """Grows by one at each reconnect of the same process; the greatest wins."""
    host: str
    pid: int
    command: str = ""
    """What the sender runs, as Join's fact of that name: for the refusal of another job."""


@dataclass(frozen=True)
class Welcome:
    """
    The scheduler's answer to Hello; said again to who has not joined once the specification is
    known.
    """

    job: str
    run: str
    """Unique name of this run: folder of its logs."""
    spec: str
    """
    The job's specification as JSON, opaque to the rendezvous; empty when no agent has given one
    yet.
    """
    scheduler: str
    """Incarnation of the scheduler, 32 hexadecimal digits."""
    heartbeat: float
    """Seconds between the heartbeats that the scheduler expects."""
    dead: float
    """Seconds of silence after which either side counts the other as lost."""
    lease: float = 0.0
    """
    Seconds without an answer of the scheduler after which a node ends its own workers, because a
    new generation may be formed without it; 0: never, the job cannot go on without this node.
    """
    patience: float = 60.0
    """
    Seconds for which a node waits for a lost scheduler to come back before it gives the job up.
    """


@dataclass(frozen=True)
class Join:
    """A node asks to take part."""

    node: str
    """Name of the node, unique in the job."""
    node_rank: int | None
    """The place that the user asked for, or None."""
    workers: int
    facts: dict[str, str] = field(default_factory=dict)
    """
    What must, or should, agree between nodes: command, script, python, torch, pdrun, device ...
    """
    store: str = ""
    """
    ``HOST:PORT`` of a listening socket that this agent holds for the store, should it get rank 0.
    """
    spec: str = ""
    """The job's specification as JSON, for a scheduler that was started without one."""


@dataclass(frozen=True)
class Waiting:
    """Sent to every joined agent while the job is gathering."""

    present: tuple[str, ...]
    """Names of those who are here, at most 16."""
    missing: tuple[str, ...]
    """
    Names, or descriptions (``node rank 2``, ``1 more node``), of what is not here, at most 16.
    """
    expected: int
    """Nodes that are awaited: the least of an elastic job, or the most once the least are here."""
    elapsed: float
    timeout: float
    here: int = 0
    """How many are here; 0 where a sender does not say: as many as ``present`` names."""


@dataclass(frozen=True)
class Refuse:
    """The scheduler will not take the sender; the connection ends."""

    code: int
    """The exit code that the refused side should leave with."""
    reason: str
    rejoin: bool = False
    """
    True: this agent was given up, the job goes on. End the workers; then a new agent on this node
    may join.
    """


@dataclass(frozen=True)
class Standby:
    """You are in, but have no part in the present generation: a spare, or too late for it."""

    reason: str
    """One line for the user."""


@dataclass(frozen=True)
class Assign:
    """A node's place in a generation. Small on purpose: nobody is sent everybody's table."""

    generation: int
    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    restarts: int
    master: str
    """``HOST:PORT`` of the store that rank 0's node holds."""
    local_rank: int = 0
    """
    Workers of lower ranks on the same host, in other nodes; for a dynamic cluster, where a worker
    is a node.
    """
    local_world_size: int = 0
    """All workers on the same host, over all of its nodes."""
    agreed_step: int = -1
    """
    The last step of which every worker of an earlier generation had said that it is saved; -1:
    none.
    """


@dataclass(frozen=True)
class Ready:
    """This node can start its workers of the generation."""

    generation: int


@dataclass(frozen=True)
class Unready:
    """This node cannot start its workers; nothing was started anywhere."""

    generation: int
    code: int
    reason: str


@dataclass(frozen=True)
class Start:
    """Every node is ready: start the workers."""

    generation: int


@dataclass(frozen=True)
class WorkerExit:
    """One worker has ended, well or not."""

    generation: int
    rank: int
    cause: Cause


@dataclass(frozen=True)
class Finished:
    """Every worker of this node has ended and every descendant is gone."""

    generation: int
    store: str = ""
    """A fresh store address for the next generation."""


@dataclass(frozen=True)
class StopWorkers:
    """End the workers of a generation: send ``signal``, and SIGKILL after ``grace`` seconds."""

    generation: int
    signal: int
    grace: float
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The end of the job, the same for every node."""

    code: int
    reason: str
    """One line."""
    first: Failure | None = None
    """The first cause, when a worker was it."""
    others: tuple[Failure, ...] = ()
    """Further failures that had a cause of their own (at most 8)."""
    victims: int = 0
    """How many workers ended because of the first cause."""


@dataclass(frozen=True)
class Heartbeat:
    """I am alive. ``number`` counts up; ``echo`` is the last number that the scheduler echoed."""

    number: int
    echo: int


@dataclass(frozen=True)
class Echo:
    """The scheduler's answer to a Heartbeat, so that a one-way cut is seen on both sides."""

    number: int


@dataclass(frozen=True)
class Leave:
    """This agent goes; sent after the Verdict, or earlier with a reason."""

    reason: str = ""


@dataclass(frozen=True)
class Depart:
    """
    This node must go, the job may go on without it: as Leave, but in order. Its workers are ended
    with the usual grace (StopWorkers), it says Finished, then Leave. Where the job cannot go on
    without it, the whole job is stopped.
    """

    reason: str


@dataclass(frozen=True)
class Step:
    """How far one worker is."""

    rank: int
    step: int
    busy: float = 0.0
    """
    Seconds of its own work in the last step, without waiting for others, where the script tells;
    else 0.
    """


@dataclass(frozen=True)
class Progress:
    """How far the workers of a node are: those that have moved since the last Progress."""

    generation: int
    steps: tuple[Step, ...] = ()
    saved: int = -1
    """The last step that every worker of this node has said to be saved; -1: none."""


@dataclass(frozen=True)
class Hung:
    """A worker of this node seems to hang."""

    generation: int
    rank: int
    why: str
    """One line: ``no progress for 300 s (step 1200)``."""
    waits: bool = False
    """
    It is only quiet, as who waits for others is: no hang while a worker of another node is at work.
    """


@dataclass(frozen=True)
class ShowStacks:
    """Tell what your workers are doing."""

    generation: int


@dataclass(frozen=True)
class StackGroup:
    """Workers that stand at the same place."""

    ranks: tuple[int, ...]
    stack: str
    """Innermost call first, as faulthandler prints it; at most 8 KiB."""


@dataclass(frozen=True)
class Stacks:
    """The answer to ShowStacks: the workers of this node, grouped by equal stack."""

    generation: int
    groups: tuple[StackGroup, ...]
    active: tuple[int, ...] = ()
    """Ranks that are at work: within the hang timeout they printed, used CPU time or did a step."""


@dataclass(frozen=True)
class Notice:
    """
    Something for the people at the terminals, a slow worker, a hang, a node that was lost; one line
    or several.
    """

    text: str


@dataclass(frozen=True)
class StopRequest:
    """
    Somebody wants the whole job to stop: ``signal`` goes to the workers, the job's code is ``128 +
    signal``.
    """

    signal: int
    by: str
    force: bool = False
    """True: no grace, SIGKILL at once."""


@dataclass(frozen=True)
class StatusQuery:
    """How is the job?"""


@dataclass(frozen=True)
class StatusReply:
    """
    The job's status: the event log's lines so far, newest last, cut to the newest that fit in a
    message.
    """

    lines: tuple[str, ...]


Message = (
    Hello
    | Welcome
    | Join
    | Waiting
    | Refuse
    | Assign
    | Ready
    | Unready
    | Start
    | WorkerExit
    | Finished
    | StopWorkers
    | Verdict
    | Heartbeat
    | Echo
    | Leave
    | Standby
    | Depart
    | Progress
    | Hung
    | ShowStacks
    | Stacks
    | Notice
    | StopRequest
    | StatusQuery
    | StatusReply
)

OPTIONAL_MESSAGES = (Progress, Stacks, Notice)
"""
Said beside a job's course: one that fits into no envelope is left out. Anything else must be said:
see `Refuse`.
"""


@dataclass(frozen=True)
class Envelope:
    """What travels: a message with everything that fencing needs."""

    sender: str
    """``agent`` of Hello, or the scheduler's incarnation."""
    incarnation: int
    sequence: int
    """
    Counts up from 0 on each connection; a replay or a gap is refused. Heartbeat and Echo are
    outside the count, and always 0: a relay answers them in the scheduler's place.
    """
    body: Message

    LIMIT: ClassVar[int] = 1 << 20
    """Bytes of one encoded envelope, at most."""
