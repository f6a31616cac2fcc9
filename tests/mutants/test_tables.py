"""The tables of mutants fit the source and the tests: ``scripts/mutants`` does the long work."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest

from tests.mutants.tables import ALL, TABLES

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def find_test_names(file: str) -> frozenset[str]:
    """Return the names of the test functions in a file."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@functools.cache
def compile_file(file: str) -> CodeType:
    """Return the code of a file of the product."""
    return compile((ROOT / file).read_text(), file, "exec")


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
        edited = compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        if edited == compile_file(mutant.file):
            wrong.append(f"{mutant.hazard}: the edit changes nothing")
        file, _, name = mutant.test.partition("::")
        if name.partition("[")[0] not in find_test_names(file):
            wrong.append(f"{mutant.hazard}: {file} has no {name}")
    assert not wrong, "correct the table of this room:\n" + "\n".join(wrong)


def test_no_hazard_twice() -> None:
    counts = Counter(f"{room}: {mutant.hazard}" for room, mutant in ALL)
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(counts) >= 150
