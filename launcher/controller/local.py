"""
Several nodes on this machine: the payload of each simulated node's agent.

An agent reads one line of JSON on stdin, which stays open as its lifeline:

    {"spec": "{...}", "sources": {...}, "secret": "9f3c...", "scheduler_fd": 5 | null,
     "quiet": false, "tty": [true, true], "colour": true, "front": 4711, "run": "",
     "nofile": [1024, 4096] | null}

On the same socket it reports its progress, with the bytes of `Lifeline`.

Node 0 gets the scheduler's listening socket and prints what is printed once per job. The others
are quiet.
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

LOOPBACK_HOST = "127.0.0.1"
LISTEN_BACKLOG = 1024


def bind_scheduler() -> socket.socket:
    """
    Return a listening socket on loopback.

    The system chooses the port, and the socket is passed on open: no other process can take it.

    Raises:
        RendezvousError: loopback cannot be listened on.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK_HOST, 0))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"cannot listen: {error.strerror}", where=LOOPBACK_HOST) from error
    return listener


def make_agent_starts(
    plan: LaunchPlan,
    listener: socket.socket,
    secret: Secret,
    *,
    controller_pid: int,
    process_data: Mapping[str, Any],
) -> tuple[AgentStart, ...]:
    """
    Return the agents of a plan of mode ``local``, node 0 first.

    Args:
        plan: the plan of the job.
        listener: the scheduler's socket, from `bind_scheduler`.
        secret: the secret of this job.
        controller_pid: process that starts them, which `pdrun stop` signals.
        process_data: `Console.to_json` of that process, and ``nofile``: the user's RLIMIT_NOFILE
            if it was raised.
    """
    scheduler = Endpoint(LOOPBACK_HOST, int(listener.getsockname()[1]))
    sources = {**plan.sources, "place.scheduler": "--local", "place.node_rank": "--local"}
    starts = []
    for index in range(plan.spec.resources.max_members):
        has_scheduler = index == 0
        payload = {
            "spec": _node_spec(plan, index, scheduler),
            "sources": sources,
            "secret": secret.reveal().hex(),
            "scheduler_fd": listener.fileno() if has_scheduler else None,
            "quiet": not has_scheduler,
            "front": controller_pid,
            "run": "",
            **process_data,
        }
        starts.append(
            AgentStart(
                node=f"node{index}",
                payload=json.dumps(payload) + "\n",
                pass_fds=(listener.fileno(),) if has_scheduler else (),
            )
        )
    return tuple(starts)


def _node_spec(plan: LaunchPlan, index: int, scheduler: Endpoint) -> str:
    node_rank = index if index < plan.nodes else None  # a spare has no rank
    cluster = replace(
        plan.spec.place,
        local=True,
        simulated=(index, plan.spec.resources.max_members),
        node_rank=node_rank,
        scheduler=scheduler,
        token_file="",
    )
    return replace(plan.spec, place=cluster).to_json()
