"""What a command line of a launcher means, as one line of text: the same for pdrun and others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdrun.launcher.config.spec import JobSpec

WORKER_WORDS = {"accelerators-or-cpus": "auto", "accelerators": "gpu", "cpus": "cpu"}


@dataclass
class JobShape:
    """Ranks, where they meet, and what they run."""

    nodes: str = "1"
    """``N``, ``MIN:MAX``, or hosts with their workers: ``a:2,b:2``."""
    workers: str = "1"
    """Per node; ``-`` if the hosts have them."""
    node_rank: int | None = None
    meet: str = ""
    """Address of the first node, or the port only for one node; empty: any."""
    restarts: int = 0
    role: str = "default"
    argv: Sequence[str] = ()
    """With N for the local rank."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES."""
    variables: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return all of it as text."""
        parts = [f"{self.nodes} x {self.workers}"]
        if self.node_rank is not None:
            parts.append(f"node {self.node_rank}")
        if self.meet:
            parts.append(f"at {self.meet}")
        if self.restarts:
            parts.append(f"{self.restarts} restarts")
        if self.role != "default":
            parts.append(f"role {self.role}")
        if self.devices:
            parts.append(f"devices {self.devices}")
        parts += [f"{name}={value}" for name, value in sorted(self.variables.items())]
        return f"{', '.join(parts)}: {shlex.join(self.argv)}"


def shape_of_spec(spec: JobSpec, devices: str = "") -> JobShape:
    """Return what a job of pdrun is."""
    from pdrun.launcher.plan.program import program_argv

    nodes = spec.resources.node_range
    workers = str(WORKER_WORDS.get(str(spec.resources.devices), spec.resources.devices))
    hosts = spec.place.hosts
    if hosts:
        nodes = ",".join(
            host.name if host.devices is None else f"{host.name}:{host.devices}" for host in hosts
        )
        if any(host.indices is not None for host in hosts):
            nodes = "@".join(
                f"{host.name}:{','.join(map(str, host.indices or range(host.devices or 0)))}"
                for host in hosts
            )
        if all(host.devices is not None for host in hosts):
            workers = "-"
    meet = ""
    if spec.place.store is not None and (spec.place.store.port or spec.place.store.host):
        meet = str(spec.place.store)
        if nodes == "1":
            meet = f":{spec.place.store.port}" if spec.place.store.port else ""
    elif spec.place.scheduler is not None and nodes != "1":
        meet = str(spec.place.scheduler)
    env = dict(spec.env)
    return JobShape(
        nodes=nodes,
        workers=workers,
        node_rank=None if nodes == "1" else spec.place.node_rank,
        meet=meet,
        restarts=spec.policy.max_restarts,
        role=env.pop("ROLE_NAME", "default"),
        argv=program_argv(spec.program, "python"),
        devices=devices,
        variables=env,
    )
