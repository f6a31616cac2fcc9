"""The reference from docstrings, the gallery and the tutorial."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pdrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = runpy.run_path(str(ROOT / "scripts/site_pages.py"))
TUTORIAL = sorted((ROOT / "docs/tutorial").glob("*.md"))
MAX_TUTORIAL_LINES = 70


def test_the_reference_has_every_public_name_and_its_docstring() -> None:
    text = PAGES["render_reference"]()
    parts = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |^## |\Z)", text, re.M | re.S))
    assert set(parts) == set(pdrun.__all__) - {"__version__"}
    empty = [name for name, part in parts.items() if not re.search(r"^[A-Z*`\"].{15,}", part, re.M)]
    assert empty == []


def test_sections_of_docstrings_become_lists() -> None:
    lines = PAGES["render_docstring"](
        "Do it.\n\nArgs:\n    one: first\n        line.\n    two: more.\n\nReturns:\n    a thing."
    )
    text = "\n".join(lines)
    assert "* `one`: first line.\n* `two`: more." in text and "* a thing." in text


def test_the_gallery_has_the_examples_of_its_script_and_their_output() -> None:
    listed = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gallery"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    text = (ROOT / "docs/gallery.md").read_text()
    blocks = re.findall(r"^    \$ (.*)\n((?:    .*\n|\n(?=    ))+)", text, re.M)
    assert [command for command, _ in blocks] == listed and len(listed) == 10
    assert all(len(output.strip().splitlines()) >= 2 for _, output in blocks)


def test_the_tutorial_has_six_short_pages_that_lead_to_each_other() -> None:
    assert len(TUTORIAL) == 6
    for page, following in zip(TUTORIAL, [*TUTORIAL[1:], None], strict=True):
        text = page.read_text()
        assert len(text.splitlines()) <= MAX_TUTORIAL_LINES, page.name
        assert following is None or f"({following.name})" in text, page.name
