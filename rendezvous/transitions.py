"""
The legal life of a job, as a table.

    gathering --full--> assigning --ready--> running --finished--> done
        |                 |    ^                | \
        |end              |end  `--- again      |  stop --> stopping --finished--> done
        v                 v        |            v              ^
       done              done      `------- restarting --stop--'      (restarting --finished--> done: no retry helps)

What is not in the table is refused: the machine raises IllegalEvent, which names event and state, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from pdrun.rendezvous.messages import Finished, Join, Message, Ready, Unready, WorkerExit


class JobState(Enum):
    """Where a job stands."""

    GATHERING = "gathering"
    ASSIGNING = "assigning"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"


class Trigger(Enum):
    """What moves a job from state to state."""

    FULL = "every node has joined"
    READY = "every node is ready"
    FAILED = "a worker failed and may be tried again"
    STOP = "the workers must end for good"
    AGAIN = "every worker has ended, start the next generation"
    FINISHED = "every worker has ended for good"
    END = "the job ends before any worker started"
    ORPHANED = "the scheduler's own node is gone"


_S, _T = JobState, Trigger

TRANSITIONS: Mapping[tuple[JobState, Trigger], JobState] = {
    (_S.GATHERING, _T.FULL): _S.ASSIGNING,
    (_S.GATHERING, _T.END): _S.DONE,
    (_S.GATHERING, _T.ORPHANED): _S.DONE,
    (_S.ASSIGNING, _T.READY): _S.RUNNING,
    (_S.ASSIGNING, _T.END): _S.DONE,
    (_S.ASSIGNING, _T.ORPHANED): _S.DONE,
    (_S.RUNNING, _T.FAILED): _S.RESTARTING,
    (_S.RUNNING, _T.STOP): _S.STOPPING,
    (_S.RUNNING, _T.FINISHED): _S.DONE,
    (_S.RUNNING, _T.ORPHANED): _S.DONE,
    (_S.RESTARTING, _T.AGAIN): _S.ASSIGNING,
    (_S.RESTARTING, _T.STOP): _S.STOPPING,
    (_S.RESTARTING, _T.FINISHED): _S.DONE,
    (_S.RESTARTING, _T.ORPHANED): _S.DONE,
    (_S.STOPPING, _T.FINISHED): _S.DONE,
    (_S.STOPPING, _T.ORPHANED): _S.DONE,
}

_STARTED = frozenset({_S.RUNNING, _S.RESTARTING, _S.STOPPING, _S.DONE})

LEGAL: Mapping[type[Message], frozenset[JobState]] = {
    Join: frozenset(JobState),
    Ready: frozenset({_S.ASSIGNING}) | _STARTED,
    Unready: frozenset({_S.ASSIGNING, _S.DONE}),
    WorkerExit: _STARTED,
    Finished: _STARTED,
}
"""Messages that make sense only in some states. Repeats after a reconnection are legal and change nothing."""


class IllegalEvent(Exception):
    """An event that the present state does not allow. Nothing was changed; the sender is at fault."""

    def __init__(self, event: str, state: JobState, why: str = "") -> None:
        super().__init__(f"{event} is not allowed while the job is {state.value}" + (f": {why}" if why else ""))
        self.event = event
        self.state = state


def after(state: JobState, trigger: Trigger) -> JobState:
    """Return the state that ``trigger`` leads to, or raise IllegalEvent."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalEvent(f"'{trigger.value}'", state) from None
