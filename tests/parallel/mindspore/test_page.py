"""docs/mindspore.md: its examples run, and each of its rows is a promise of a page."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.mindspore import pages

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/mindspore.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```python\n# pdrun, ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])
PAGES = sorted(Path(pages.__file__).parent.glob("test_*.py"))


def read_promises() -> dict[str, dict[str, dict[str, str]]]:
    """Return the table of each page, by the title of its section in docs/mindspore.md."""
    titles = {re.sub(r"[^a-z]+", "_", title.lower()): title for title in SECTIONS}
    found = {}
    for path in PAGES:
        module = importlib.import_module(f"{pages.__name__}.{path.stem}")
        found[titles[path.stem.removeprefix("test_")]] = module.PROMISES
    return found


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
PROMISES = read_promises()


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
    assert set(EXAMPLES) == set(PROMISES) - without
    assert all(
        "# MindSpore" in SECTIONS[section] for section in set(EXAMPLES) - {"Parameter server"}
    )


@pytest.mark.parametrize("section", PROMISES)
def test_each_row_is_a_promise_of_its_page(section: str) -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", SECTIONS[section], flags=re.MULTILINE)
    promises = [row for part in PROMISES[section].values() for row in part]
    assert [row for row in rows if row != "MindSpore"] == promises


def test_no_section_is_left_out() -> None:
    assert set(SECTIONS) - set(PROMISES) == {"What is different on purpose", "Limits"}
