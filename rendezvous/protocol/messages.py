"""
The messages between agents and the scheduler: one frozen dataclass per message, plain values only.

A conversation, agent on the left:

    Hello            ->                 who I am, which job I want
                     <-  Welcome        the run and its specification          (or Refuse)
    Join             ->                 my node, my workers, my facts, my store address
                     <-  Waiting        every few seconds: present and missing nodes
                     <-  Assign         generation, my ranks, the address of rank 0's store
    Ready            ->                 I can start                            (or Unready)
                     <-  Start          all nodes can
    WorkerExit       ->                 one per worker, with its cause
                     <-  StopWorkers    a worker failed, or the job is stopped: end your workers
    Finished         ->                 all my workers of this generation have ended
                     <-  Assign         the next generation ...
                     <-  Verdict        ... or the end: one exit code for all nodes
    Leave            ->

A node that joins a complete job gets Standby and waits for a later generation. A node that must
leave (its machine is taken away) sends Depart, ends its workers as for a restart, and leaves; the
others form a new generation.

Heartbeat and Echo are independent of this, and so is Progress, which carries what the workers
report (`pdrun.progress`). Hung reports a worker that hangs; the scheduler asks all nodes for the
stacks of their workers (ShowStacks, Stacks) before it ends the generation. Notice is a line for the
terminals. StopRequest and StatusQuery come from agents and from viewers.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

from pdrun.quick_dataclass import dataclass

PROTOCOL = 3
"""
Version of this file. Two sides with different versions refuse each other and name the versions.
"""

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
    ok: exit code 0. exception: the last output was a Python traceback. signal, oom: killed. exit:
    an exit code without a traceback. communication: an exception or abort whose text means that a
    peer is lost. startup: the worker could not be started. lost: its node was lost. suspect: the
    last output was a traceback, but the worker still ran when pdrun stopped it. stopped: ended
    after pdrun's order. hang: no progress for the hang timeout.
    """
    code: int
    """
    As a shell shows it: the exit code, ``128 + N`` for signal N, 126 or 127 if it could not be
    started.
    """
    signal: int = 0
    at: float = 0.0
    """
    Monotonic seconds on the worker's node when the cause was first seen (first byte of the last
    traceback, otherwise the exit). Comparable within a node only.
    """
    summary: str = ""
    """One line: ``ValueError: boom``, ``killed by SIGSEGV (segmentation fault)``."""
    traceback: str = ""
    """The user's traceback, at most its last 64 KiB; empty: none."""
    tail: tuple[str, ...] = ()
    """The worker's last lines of output (at most 20 lines of at most 500 characters)."""
    log: str = ""
    """Path of the worker's error log on its node."""
    retry: bool = True
    """False if a restart cannot help: script missing, SyntaxError, not executable."""


@dataclass(frozen=True)
class Failure:
    """A cause with its rank and node."""

    rank: int
    node: str
    cause: Cause


@dataclass(frozen=True)
class Hello:
    """The first message of every connection; anything before it is refused."""

    version: int
    role: Role
    job: str
    """The sender's job; empty (viewers and joining nodes): any job."""
    agent: str
    """Random name of the sending process, 32 hexadecimal digits. Kept over reconnections."""
    incarnation: int
    """Number of the connection of this process; the greatest is valid."""
    host: str
    pid: int
    command: str = ""
    """The sender's command, as in Join's facts: shown when another job is refused."""
    scheduler: str = ""
    """Incarnation of the scheduler that the sender heard last, on an earlier connection."""
    commit: int = 0
    """The greatest commit that this scheduler named in its envelopes."""


@dataclass(frozen=True)
class Welcome:
    """
    The scheduler's answer to Hello. Sent again to agents without a node when the specification is
    known.
    """

    job: str
    run: str
    """Unique name of this run, and of the folder of its logs."""
    spec: str
    """
    The job's specification as JSON, opaque to the rendezvous; empty: no agent has sent one yet.
    """
    scheduler: str
    """Incarnation of the scheduler, 32 hexadecimal digits."""
    heartbeat: float
    """Seconds between the heartbeats that the scheduler expects."""
    dead: float
    """Seconds of silence after which each side treats the other as lost."""
    lease: float = 0.0
    """
    Seconds without an answer of the scheduler after which a node ends its own workers, because a
    new generation may be formed without it; 0: never, the job cannot continue without this node.
    """
    patience: float = 60.0
    """Seconds that a node waits for a lost scheduler before it ends the job."""
    keeps_port: bool = False
    """
    The agent of the scheduler's node holds the listening socket while the scheduler is restarted.
    So a refused connection means that this agent has ended, and the job with it.
    """


@dataclass(frozen=True)
class Join:
    """A node asks to join."""

    node: str
    """Name of the node, unique in the job."""
    node_rank: int | None
    """The requested node rank, or None."""
    workers: int
    facts: dict[str, str] = field(default_factory=dict)
    """
    Values that must, or should, be equal on all nodes: command, script, python, torch, pdrun,
    device ...
    """
    store: str = ""
    """``HOST:PORT`` of a listening socket of this agent, for the store if it gets rank 0."""
    spec: str = ""
    """The job's specification as JSON, for a scheduler that was started without one."""
    is_pod: bool = False
    """
    The node is a pod of Kubernetes, where one pod at a time has its name. So a node of this name is
    an earlier instance, maybe on another machine, and its workers may still run.
    """


@dataclass(frozen=True)
class Waiting:
    """Sent to every node while the job is gathering."""

    present: tuple[str, ...]
    """Names of present nodes, at most 16."""
    missing: tuple[str, ...]
    """Names, or descriptions (``node rank 2``, ``1 more node``), of missing nodes, at most 16."""
    expected: int
    """
    Number of nodes to wait for: the minimum of an elastic job, or the maximum once that is reached.
    """
    elapsed: float
    timeout: float
    here: int = 0
    """Number of present nodes; 0: as many as ``present`` names."""


@dataclass(frozen=True)
class Refuse:
    """The scheduler refuses the sender; the connection ends."""

    code: int
    """The exit code for the refused process."""
    reason: str
    rejoin: bool = False
    """
    True: this agent was marked lost and the job continues. End the workers; then a new agent on
    this node may join.
    """
    retry: bool = False
    """
    True: an earlier node of this name or rank may have ended, or its workers may still run. A new
    agent may ask again, until that one has ended, is lost or has proved to be alive.
    """


@dataclass(frozen=True)
class Standby:
    """
    The node has joined but does not take part in the present generation: a spare, or too late.
    """

    reason: str
    """One line for the user."""


@dataclass(frozen=True)
class Assign:
    """A node's place in a generation. Small on purpose: no node gets a table of all nodes."""

    generation: int
    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    restarts: int
    master: str
    """``HOST:PORT`` of the store on rank 0's node."""
    local_rank: int = 0
    """
    Number of workers of lower ranks in other nodes on the same host. Used in a dynamic cluster,
    where a node is one worker.
    """
    local_world_size: int = 0
    """Number of workers on the same host, in all of its nodes."""
    agreed_step: int = -1
    """The last step that every worker of an earlier generation had saved; -1: none."""


@dataclass(frozen=True)
class Ready:
    """This node can start its workers of the generation."""

    generation: int


@dataclass(frozen=True)
class Unready:
    """This node cannot start its workers. No node starts any."""

    generation: int
    code: int
    reason: str


@dataclass(frozen=True)
class Start:
    """Every node is ready: start the workers."""

    generation: int


@dataclass(frozen=True)
class WorkerExit:
    """One worker has ended, with or without an error."""

    generation: int
    rank: int
    cause: Cause


@dataclass(frozen=True)
class Finished:
    """Every worker of this node has ended, and no descendant process is left."""

    generation: int
    store: str = ""
    """A new store address, for the next generation."""


@dataclass(frozen=True)
class StopWorkers:
    """End the workers of a generation: send ``signal``, and SIGKILL after ``grace`` seconds."""

    generation: int
    signal: int
    grace: float
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The end of the job, the same for all nodes."""

    code: int
    reason: str
    """One line."""
    first: Failure | None = None
    """The first cause, if it is a worker's."""
    others: tuple[Failure, ...] = ()
    """Other failures with causes that are not consequences (at most 8)."""
    victims: int = 0
    """Number of workers that ended because of the first cause."""
    notes: tuple[str, ...] = ()
    """
    Of a job that failed, a line each: in what its nodes differ, and nodes that were lost or late
    while the workers were being stopped.
    """


@dataclass(frozen=True)
class Heartbeat:
    """
    The sender is alive. ``number`` counts up; ``echo`` is the last number that the scheduler
    echoed.
    """

    number: int
    echo: int


@dataclass(frozen=True)
class Echo:
    """The scheduler's answer to a Heartbeat. It shows a one-way cut to both sides."""

    number: int


@dataclass(frozen=True)
class Leave:
    """This agent leaves: after the Verdict, or earlier with a reason."""

    reason: str = ""


@dataclass(frozen=True)
class Depart:
    """
    This node must leave, and the job may continue without it. Its workers are ended with the usual
    grace (StopWorkers); it sends Finished, then Leave. If the job cannot continue without it, the
    job is stopped.
    """

    reason: str


@dataclass(frozen=True)
class Step:
    """The progress of one worker."""

    rank: int
    step: int
    busy: float = 0.0
    """
    Seconds of the worker's own work in the last step, without waiting for others; 0: not reported.
    """
    sampled: bool = False
    """Only some steps are reported: a lower step than another worker's is no lag."""


@dataclass(frozen=True)
class NodeNumber:
    """One number that the scripts of a node's workers report with their steps."""

    name: str
    count: int = 0
    """Workers with a finite value."""
    sum: float = 0.0
    least: float = 0.0
    most: float = 0.0
    rank: int = -1
    """The worker with the largest value."""
    bad_rank: int = -1
    """The worker whose value is not finite since the earliest step; -1: none."""
    bad_step: int = -1
    """That step; -1: not known."""


@dataclass(frozen=True)
class PlanFact:
    """One line about the run of a script: what was decided, and where that came from."""

    name: str
    value: str
    source: str = ""


@dataclass(frozen=True)
class Progress:
    """The progress of a node's workers: those that have changed since the last Progress."""

    generation: int
    steps: tuple[Step, ...] = ()
    saved: int = -1
    """The last step that every worker of this node has saved; -1: none."""
    total: int = 0
    """Steps of the whole run; 0: not known."""
    numbers: tuple[NodeNumber, ...] = ()
    """Of all workers of the node, by name."""
    usage: tuple[NodeNumber, ...] = ()
    """CPU, memory and devices of the node; alone in its message."""
    plan: tuple[PlanFact, ...] = ()
    """What rank 0 says about its run; alone in its message."""


@dataclass(frozen=True)
class Hung:
    """A worker of this node seems to hang."""

    generation: int
    rank: int
    why: str
    """One line: ``no progress for 300 s (step 1200)``."""
    waits: bool = False
    """
    The worker is idle and may only be waiting for others: not a hang while a worker of another node
    works.
    """
    timeout: float = 0.0
    """The job's hang timeout in seconds; 0: unknown."""


@dataclass(frozen=True)
class ShowStacks:
    """Asks for the stacks of the node's workers."""

    generation: int


@dataclass(frozen=True)
class StackGroup:
    """Workers with equal stacks."""

    ranks: tuple[int, ...]
    stack: str
    """Innermost call first, as faulthandler prints it; at most 8 KiB."""


@dataclass(frozen=True)
class CollectiveReport:
    """The last collective of a group that some ranks have called."""

    ranks: tuple[int, ...]
    group: str
    """Name of the group, the same on all ranks; empty: known only from the stack."""
    sequence: int
    """Number of the collective in its group; 0: unknown."""
    operation: str
    """``all_reduce``."""
    is_waiting: bool
    """Whether it is not complete for these ranks."""
    members: tuple[int, ...] = ()
    """The ranks of the group; empty: unknown."""


@dataclass(frozen=True)
class Stacks:
    """The answer to ShowStacks: the stacks of the node's workers, grouped."""

    generation: int
    groups: tuple[StackGroup, ...]
    active: tuple[int, ...] = ()
    """Ranks that work: within the hang timeout they printed, used CPU time or did a step."""
    spinning: tuple[int, ...] = ()
    """Ranks that use CPU time, but only to wait in a collective."""
    collectives: tuple[CollectiveReport, ...] = ()
    """Where ranks are, as far as torch's flight recorder or their stacks tell; at most 64."""


@dataclass(frozen=True)
class Notice:
    """One or more lines for the terminals: a slow worker, a hang, a lost node."""

    text: str


@dataclass(frozen=True)
class StopRequest:
    """Stops the job: the workers get ``signal``, and the job's exit code is ``128 + signal``."""

    signal: int
    by: str
    force: bool = False
    """True: no grace, SIGKILL immediately."""


@dataclass(frozen=True)
class StatusQuery:
    """Asks for the status of the job."""


@dataclass(frozen=True)
class StatusReply:
    """
    The job's status: the event log's lines so far, newest last. The oldest are cut off if all do
    not fit in a message.
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
Messages that a job does not depend on. One that is too long for an envelope is not sent. A
connection whose other messages are too long is refused (`Refuse`).
"""


@dataclass(frozen=True)
class Envelope:
    """A message with its sender and number."""

    sender: str
    """``agent`` of Hello, or the scheduler's incarnation."""
    incarnation: int
    """
    Of an agent: as in its Hello. Of the scheduler: number of its last commit to the journal, which
    has all that the message says; 0 without a journal.
    """
    sequence: int
    """
    Counts up from 0 on each connection; a repeated or missing number is refused. Heartbeat and Echo
    are not counted and have 0, because a relay answers them for the scheduler.
    """
    body: Message

    LIMIT: ClassVar[int] = 1 << 20
    """Maximum bytes of an encoded envelope."""
