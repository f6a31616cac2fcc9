"""
The legal life of a job, as a table.

    gathering --full--> assigning --ready--> running --finished--> done
      | ^  ^             |  |  ^              |    \\
      | |  `--- short ---+  |  |              |     stop --> stopping --finished--> done
      | |           changed `--'              |               |  ^
      | |                      again     failed, changed      |  |
      | |                       ^             v               |  |
      | `------- short ---------+------- restarting <-changed-'  |      (restarting --finished--> done: no retry helps)
      |                                       `------ stop ------'
      `--end--> done             (assigning --end--> done)

What is not in the table is refused: the machine raises IllegalEvent, which names event and state,
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from pdrun.rendezvous.protocol.messages import (
    Finished,
    Hung,
    Message,
    Progress,
    Ready,
    Stacks,
    Unready,
    WorkerExit,
)


class JobState(Enum):
    """Where a job stands."""

    GATHERING = "gathering"
    ASSIGNING = "assigning"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    DONE = "done"

    __hash__ = object.__hash__
    """By identity, as equality is: see `Phase`."""


class Trigger(Enum):
    """What moves a job from state to state."""

    FULL = "enough nodes have joined"
    READY = "every node is ready"
    FAILED = "a worker failed and may be tried again"
    CHANGED = "nodes have come or gone, and enough are here for another generation"
    SHORT = "too few nodes are left, others may take their places"
    STOP = "the workers must end for good"
    AGAIN = "every worker has ended, start the next generation"
    FINISHED = "every worker has ended for good"
    END = "the job ends before any worker started"
    ORPHANED = "the scheduler's own node is gone"


_S = JobState
_T = Trigger

TRANSITIONS: Mapping[tuple[JobState, Trigger], JobState] = {
    (_S.GATHERING, _T.FULL): _S.ASSIGNING,
    (_S.GATHERING, _T.END): _S.DONE,
    (_S.GATHERING, _T.ORPHANED): _S.DONE,
    (_S.ASSIGNING, _T.READY): _S.RUNNING,
    (_S.ASSIGNING, _T.CHANGED): _S.ASSIGNING,
    (_S.ASSIGNING, _T.SHORT): _S.GATHERING,
    (_S.ASSIGNING, _T.END): _S.DONE,
    (_S.ASSIGNING, _T.ORPHANED): _S.DONE,
    (_S.RUNNING, _T.FAILED): _S.RESTARTING,
    (_S.RUNNING, _T.CHANGED): _S.RESTARTING,
    (_S.RUNNING, _T.STOP): _S.STOPPING,
    (_S.RUNNING, _T.FINISHED): _S.DONE,
    (_S.RUNNING, _T.ORPHANED): _S.DONE,
    (_S.RESTARTING, _T.AGAIN): _S.ASSIGNING,
    (_S.RESTARTING, _T.SHORT): _S.GATHERING,
    (_S.RESTARTING, _T.STOP): _S.STOPPING,
    (_S.RESTARTING, _T.FINISHED): _S.DONE,
    (_S.RESTARTING, _T.ORPHANED): _S.DONE,
    (_S.STOPPING, _T.CHANGED): _S.RESTARTING,
    (_S.STOPPING, _T.FINISHED): _S.DONE,
    (_S.STOPPING, _T.ORPHANED): _S.DONE,
}

_STARTED = frozenset({_S.RUNNING, _S.RESTARTING, _S.STOPPING, _S.DONE})

LEGAL: Mapping[type[Message], frozenset[JobState]] = {
    Ready: frozenset({_S.ASSIGNING}) | _STARTED,
    Unready: frozenset({_S.ASSIGNING, _S.DONE}),
    WorkerExit: _STARTED,
    Finished: _STARTED,
    Progress: _STARTED,
    Hung: _STARTED,
    Stacks: _STARTED,
}
"""
Messages about a generation, and the states in which it has come that far. Repeats after a
reconnection are legal and change nothing; so is everything about a generation that is over.
"""


class IllegalEvent(Exception):
    """
    An event that the present state does not allow. Nothing was changed; the sender is at fault.
    """

    def __init__(self, event: str, state: JobState, why: str = "") -> None:
        super().__init__(
            f"{event} is not allowed while the job is {state.value}" + (f": {why}" if why else "")
        )
        self.event = event
        self.state = state


def after(state: JobState, trigger: Trigger) -> JobState:
    """Return the state that ``trigger`` leads to, or raise IllegalEvent."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalEvent(f"'{trigger.value}'", state) from None
