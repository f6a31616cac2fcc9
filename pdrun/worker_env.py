"""
The environment of a worker: the contract between the launcher and the script that it starts.

The launcher writes it (`WorkerEnv.to_env`). The runtime reads it (`WorkerEnv.from_env`). Neither
imports the other. The variables are torchrun's, so that its scripts run unchanged, Ascend's
(RANK_ID, RANK_SIZE, DEVICE_ID), and pdrun's (PDRUN_*).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdrun.errors import ConfigError, UsageError
from pdrun.quick_dataclass import dataclass


@dataclass(frozen=True)
class WorkerEnv:
    """Identity of a worker and address of the store. Counts are at least 1, ranks at least 0."""

    rank: int
    """Global rank, 0 to ``world_size - 1``."""
    world_size: int
    local_rank: int
    """Rank inside the node, 0 to ``local_world_size - 1``."""
    local_world_size: int
    node_rank: int
    """Index of the node, 0 to ``nodes - 1`` (torchrun's GROUP_RANK)."""
    nodes: int
    master_addr: str
    """Address of the TCPStore, on the node of rank 0."""
    master_port: int
    run_id: str
    """Unique name of this run, or the id that the user has set."""
    restart_count: int = 0
    """Restarts of the job before this generation; equal on all nodes."""
    max_restarts: int = 0
    generation: int = 0
    job: str = "job"
    node: str = "localhost"
    """Name of this node, as shown in logs."""
    device_kind: str = "cpu"
    """Name of the backend table: cpu, cuda, rocm, npu, xpu or mps."""
    device_index: int = 0
    """Index of the device among those visible to this worker."""
    collective: str = "gloo"
    """torch.distributed's name of the backend for the device."""
    agreed_step: int = -1
    """The last step that every worker of an earlier generation reported as saved; -1: none."""
    agent: str = ""
    """Path of the agent's datagram socket, in a folder of mode 0700; empty: no agent."""
    run: str = ""
    """Unique name of this run, the same in all generations; empty: not known."""

    def to_env(self) -> dict[str, str]:
        """Return the variables, as text."""
        env = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "NODE_RANK": str(self.node_rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK_ID": str(self.rank),
            "RANK_SIZE": str(self.world_size),
            "DEVICE_ID": str(self.device_index),
            "PDRUN_JOB": self.job,
            "PDRUN_NODE": self.node,
            "PDRUN_GENERATION": str(self.generation),
            "PDRUN_DEVICE_KIND": self.device_kind,
            "PDRUN_COLLECTIVE": self.collective,
        }
        if self.agreed_step >= 0:
            env["PDRUN_AGREED_STEP"] = str(self.agreed_step)
        if self.agent:
            env["PDRUN_AGENT"] = self.agent
        if self.run:
            env["PDRUN_RUN"] = self.run
        return env

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WorkerEnv | None:
        """
        Read the variables that pdrun or torchrun has set; None if RANK and WORLD_SIZE are unset.

        Raises:
            ConfigError: a variable is missing or contradicts another one.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return None
        rank = _read_count(environ, "RANK")
        world = _read_count(environ, "WORLD_SIZE")
        local = _read_count(environ, "LOCAL_RANK", 0 if world == 1 else None)
        found = cls(
            rank=rank,
            world_size=world,
            local_rank=local,
            local_world_size=_read_count(environ, "LOCAL_WORLD_SIZE", 1 if world == 1 else None),
            node_rank=_read_count(environ, "GROUP_RANK", 0),
            nodes=_read_count(environ, "GROUP_WORLD_SIZE", 1),
            master_addr=environ.get("MASTER_ADDR", ""),
            master_port=_read_count(environ, "MASTER_PORT", 0),
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            restart_count=_read_count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_read_count(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
            generation=_read_count(environ, "PDRUN_GENERATION", 0),
            job=environ.get("PDRUN_JOB", environ.get("TORCHELASTIC_RUN_ID", "job")),
            node=environ.get("PDRUN_NODE", "localhost"),
            device_kind=environ.get("PDRUN_DEVICE_KIND", ""),
            device_index=_read_count(environ, "DEVICE_ID", local),
            collective=environ.get("PDRUN_COLLECTIVE", ""),
            agreed_step=_read_count(environ, "PDRUN_AGREED_STEP", -1),
            agent=environ.get("PDRUN_AGENT", ""),
            run=environ.get("PDRUN_RUN", ""),
        )
        for low, high, names in (
            (found.rank, found.world_size, "RANK and WORLD_SIZE"),
            (found.local_rank, found.local_world_size, "LOCAL_RANK and LOCAL_WORLD_SIZE"),
        ):
            if low >= high:
                raise ConfigError(f"rank must be below {high}, got {low}", where=names)
        return found


def refuse_reserved(name: str, *, where: str) -> None:
    """
    Raise UsageError if pdrun itself must set this variable: ranks, sizes, the store, the job.

    ROLE_NAME is allowed: it is a label that torchrun's ``--role`` sets.
    """
    owned = set(WorkerEnv(0, 1, 0, 1, 0, 1, "", 0, "").to_env()) - {"ROLE_NAME"}
    if name in owned or name.startswith(("TORCHELASTIC_", "PDRUN_WORKER_", "PDRUN_SERVER")):
        raise UsageError(
            f"{name} is set by pdrun for each worker and cannot be set by the user",
            where=where,
            hint="use another name",
        )


def _read_count(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the non-negative integer in a variable, or ``default`` if it is unset."""
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError("is not set, but other variables of a launcher are", where=name)
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{text!r} is not a whole number", where=name)
    return int(text)
