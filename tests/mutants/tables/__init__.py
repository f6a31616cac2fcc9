"""The tables of mutants, one per room or subject; `ALL` has them in order."""

from __future__ import annotations

from tests.mutants.model import Mutant
from tests.mutants.tables import (
    agent,
    checkpoint,
    controller,
    fast_start,
    fence,
    journal,
    layouts,
    membership,
    nodes_lost,
    output,
    pipeline,
    policies,
    protocol,
    ranktables,
    scheduler,
    servers,
    supervisor,
    training,
    transport,
    zero,
)

TABLES: dict[str, tuple[Mutant, ...]] = {
    "membership": membership.MUTANTS,
    "lost nodes": nodes_lost.MUTANTS,
    "policies": policies.MUTANTS,
    "journal": journal.MUTANTS,
    "protocol": protocol.MUTANTS,
    "transport": transport.MUTANTS,
    "scheduler": scheduler.MUTANTS,
    "supervisor": supervisor.MUTANTS,
    "fast start": fast_start.MUTANTS,
    "fence": fence.MUTANTS,
    "agent": agent.MUTANTS,
    "output": output.MUTANTS,
    "controller": controller.MUTANTS,
    "rank tables": ranktables.MUTANTS,
    "pipeline": pipeline.MUTANTS,
    "layouts": layouts.MUTANTS,
    "zero": zero.MUTANTS,
    "checkpoint": checkpoint.MUTANTS,
    "training": training.MUTANTS,
    "servers": servers.MUTANTS,
}
"""Room -> its mutants."""

ALL: tuple[tuple[str, Mutant], ...] = tuple(
    (room, mutant) for room, mutants in TABLES.items() for mutant in mutants
)
"""(room, mutant)."""
