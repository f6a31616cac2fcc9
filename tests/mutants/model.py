"""
What a mutant is: one edit of the source that takes a protection out or moves a boundary.

A test that guards the protection fails with the edit. The edits are data (`tests.mutants.tables`),
`runner` tries them, `scripts/mutants` is the command.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault that a test must notice."""

    hazard: str
    """What is wrong with the edited source; unique in its table."""
    file: str
    old: str
    """Stands in the file exactly once."""
    new: str
    test: str
    """Passes without the edit and fails with it. Without [...]: all cases of the test."""
