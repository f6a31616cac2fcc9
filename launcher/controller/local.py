"""
Several nodes on this machine: what each simulated node's agent is told.

An agent reads one line of JSON on stdin, which stays open as its lifeline:

    {"spec": "{...}", "sources": {...}, "secret": "9f3c...", "scheduler_fd": 5 | null,
     "quiet": false, "tty": [true, true], "colour": true, "front": 4711, "run": "",
     "nofile": [1024, 4096] | null}

and says on the same socket how far it is: `UP`, `RUNNING` of
`pdrun.launcher.controller.agent_handle`.

Node 0 gets the scheduler's listening socket and prints what is printed once a job; the others are
quiet.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError
from pdrun.launcher.controller.agent_handle import AgentStart
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import Secret

HOST = "127.0.0.1"
_BACKLOG = 1024


def bind_scheduler() -> socket.socket:
    """
    Return a listening socket on loopback, its port chosen by the system: held from here on, never
    guessed.

    Raises:
        RendezvousError: loopback cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((HOST, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"cannot listen: {error.strerror}", where=HOST) from error
    return listener


def agent_starts(
    plan: LaunchPlan,
    listener: socket.socket,
    secret: Secret,
    *,
    front: int,
    screen: Mapping[str, Any],
) -> tuple[AgentStart, ...]:
    """
    Return the agents of a plan of mode ``local``, node 0 first.

    Args:
        plan: what to start.
        listener: the scheduler's socket, from `bind_scheduler`.
        secret: of this job.
        front: pid of the process that starts them, which `pdrun stop` signals.
        screen: `Console.to_json` of that process, and ``nofile``: the user's RLIMIT_NOFILE where it
            was raised.
    """
    endpoint = Endpoint(HOST, int(listener.getsockname()[1]))
    return tuple(
        AgentStart(
            node=f"node{index}",
            line=json.dumps(
                {
                    "spec": _node_spec(plan, index, endpoint),
                    "sources": {
                        **plan.sources,
                        "place.scheduler": "--local",
                        "place.node_rank": "--local",
                    },
                    "secret": secret.reveal().hex(),
                    "scheduler_fd": None if index else listener.fileno(),
                    "quiet": bool(index),
                    "front": front,
                    "run": "",
                    **screen,
                }
            )
            + "\n",
            pass_fds=() if index else (listener.fileno(),),
        )
        for index in range(plan.spec.resources.members)
    )


def _node_spec(plan: LaunchPlan, index: int, endpoint: Endpoint) -> str:
    rank = index if index < plan.nodes else None  # a spare has no place of its own
    place = replace(
        plan.spec.place,
        local=True,
        simulated=(index, plan.spec.resources.members),
        node_rank=rank,
        scheduler=endpoint,
        token_file="",
    )
    return replace(plan.spec, place=place).to_json()
