"""docs/mindspore.md: its examples run, and each of its rows has a test."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.mindspore.proofs import PROOFS

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/mindspore.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```python\n# pdrun, ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])


def read_examples() -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the code that all examples use, and the number of ranks and code of each section."""
    shared = FENCED.search(PAGE)
    assert shared is not None and shared[1] == "used by all examples"
    examples = {}
    for section, text in SECTIONS.items():
        for words, code in FENCED.findall(text):
            examples[section] = (int(words.split()[0]), code)
    return shared[2], examples


SHARED, EXAMPLES = read_examples()


def run_example(path: str) -> list[float]:
    """Return the losses of two steps of the run that an example makes; none without a run."""
    found = runpy.run_path(path)
    if "run" not in found:
        return []
    return [found["run"].step(found["batch"]).loss for _ in range(2)]


@pytest.mark.parametrize("section", EXAMPLES)
def test_the_examples_have_the_loss_of_one_process(
    worlds: Any, tmp_path: Path, section: str
) -> None:
    ranks, code = EXAMPLES[section]
    script = tmp_path / "example.py"
    script.write_text(f"{SHARED}\n\n{code}")
    shared = tmp_path / "shared.py"
    shared.write_text(SHARED)
    alone = train_alone(str(shared))
    for losses in worlds(ranks).run(run_example, str(script)):
        assert losses == pytest.approx(alone, rel=1e-5) or (losses == [] and "run =" not in code)


def train_alone(path: str) -> list[float]:
    """Return the losses of two steps in one process, with torch only."""
    space = runpy.run_path(path)
    torch_optimizer = space["optimizer"](space["model"].parameters())
    losses = []
    for _ in range(2):
        total, count = space["loss"](space["model"](space["batch"][0]), space["batch"])
        mean = total / count
        torch_optimizer.zero_grad()
        mean.backward()
        torch_optimizer.step()
        losses.append(mean.item())
    assert losses[1] < losses[0]
    return losses


def test_every_section_of_a_tutorial_has_an_example() -> None:
    without = {"Starting", "Dataset slicing", "Checkpoints", "Failures"}
    assert set(EXAMPLES) == set(PROOFS) - without
    assert all(
        "# MindSpore" in SECTIONS[section] for section in set(EXAMPLES) - {"Parameter server"}
    )


@pytest.mark.parametrize("section", PROOFS)
def test_each_row_has_a_test(section: str) -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", SECTIONS[section], flags=re.MULTILINE)
    assert [row for row in rows if row != "MindSpore"] == list(PROOFS[section])
    for proof in PROOFS[section].values():
        path, _, name = proof.partition("::")
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, proof


def test_no_section_is_left_out() -> None:
    assert set(SECTIONS) - set(PROOFS) == {"What is different on purpose", "Limits"}
