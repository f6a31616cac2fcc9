"""The table of mutants fits the source and the tests: ``scripts/mutants`` does the long work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher.stdlib_only.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.hazard)
def test_each_edit_has_its_place_and_its_test(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, _, name = mutant.test.partition("::")
    assert re.search(
        rf"^def {re.escape(name.partition('[')[0])}\(", (ROOT / file).read_text(), re.MULTILINE
    )


def test_no_hazard_twice() -> None:
    assert len({mutant.hazard for mutant in MUTANTS}) == len(MUTANTS) > 35
