"""The tables of mutants, one per room; `ALL` has them in order."""

from __future__ import annotations

from tests.mutants.model import Mutant
from tests.mutants.tables import (
    fast_start,
)

TABLES: dict[str, tuple[Mutant, ...]] = {
    "fast start": fast_start.MUTANTS,
}
"""Room -> its mutants."""

ALL: tuple[tuple[str, Mutant], ...] = tuple(
    (room, mutant) for room, mutants in TABLES.items() for mutant in mutants
)
"""(room, mutant)."""
