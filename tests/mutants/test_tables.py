"""The tables of mutants fit the source and the tests: ``scripts/mutants`` does the long work."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.model import Mutant
from tests.mutants.tables import ALL, TABLES

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def find_test_names(file: str) -> frozenset[str]:
    """Return the names of the test functions in a file."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("room", TABLES)
def test_each_edit_has_its_place_and_its_test(room: str) -> None:
    wrong = []
    for mutant in TABLES[room]:
        text = (ROOT / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            wrong.append(
                f"{mutant.hazard}: {mutant.file} has its text {text.count(mutant.old)} times"
            )
            continue
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        file, _, name = mutant.test.partition("::")
        if name.partition("[")[0] not in find_test_names(file):
            wrong.append(f"{mutant.hazard}: {file} has no {name}")
    assert not wrong, "correct the table of this room:\n" + "\n".join(wrong)


def test_each_edit_changes_something() -> None:
    def shape(text: str) -> str:
        return ast.dump(ast.parse(text))

    same: list[Mutant] = []
    for _, mutant in ALL:
        text = (ROOT / mutant.file).read_text()
        if mutant.old in text and shape(text) == shape(text.replace(mutant.old, mutant.new)):
            same.append(mutant)
    assert not same


def test_no_hazard_twice() -> None:
    counts = Counter(f"{room}: {mutant.hazard}" for room, mutant in ALL)
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(counts) >= 40
