"""docs/layouts.md says what happens: its examples are run."""

from __future__ import annotations

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs" / "layouts.md"


def test_the_examples_of_the_docs() -> None:
    found = doctest.testfile(str(DOCS), module_relative=False)
    assert found.attempted > 25
    assert found.failed == 0
