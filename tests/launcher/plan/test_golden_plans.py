import os
from pathlib import Path

import pytest

from tests.launcher.plan.golden import format_outcome, load_case, rewrite_case

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_gives_exactly_its_plan(path: Path, tmp_path: Path) -> None:
    case = load_case(path)
    text = format_outcome(case, tmp_path)
    if os.environ.get("PDRUN_GOLDEN") == "write":
        rewrite_case(path, text)
        return
    assert text == case["expect"]


def test_there_are_cases_of_every_mode() -> None:
    texts = [load_case(path)["expect"] for path in CASES]
    for mode in ("single", "local", "head", "join"):
        assert any(f"\nmode       {mode}" in text for text in texts), mode
