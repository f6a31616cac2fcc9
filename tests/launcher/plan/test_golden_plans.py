import os
from pathlib import Path

import pytest

from tests.launcher.plan.golden import load, outcome, rewrite

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_leads_to_exactly_its_plan(path: Path, tmp_path: Path) -> None:
    case = load(path)
    text = outcome(case, tmp_path)
    if os.environ.get("PDRUN_GOLDEN") == "write":
        rewrite(path, text)
        return
    assert text == case["expect"]


def test_there_are_cases_of_every_mode() -> None:
    texts = [load(path)["expect"] for path in CASES]
    for mode in ("single", "local", "head", "join"):
        assert any(f"\nmode       {mode}" in text for text in texts), mode
