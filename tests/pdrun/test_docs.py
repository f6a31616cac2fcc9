"""What the documents promise exists: links, and the options in their commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from pdrun.launcher.cli.commands import build_command_line
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.run_options import RUN_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks/README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def options(command: click.Command) -> Iterator[str]:
    """Yield every option of a command and of those below it."""
    yield from (name for param in command.params for name in param.opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_in_commands_exist(page: Path) -> None:
    group = build_command_line()
    known = {name for row in (*RUN_OPTIONS, *ALIAS_OPTIONS) for name in row.names}
    known |= set(options(group))
    for line in re.findall(r"^    .*?\bpdrun (.*)$", page.read_text(), re.MULTILINE):
        ours = line.split(".py")[0].split("#")[0].split("translate -- ")[0]
        for option in re.findall(r"(?<!\S)--?[a-z][a-z_-]*", ours):
            assert option in known, f"{option} in: pdrun {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:launcher|rendezvous|parallel|backends|ui|tests|scripts|docs|examples)/[\w/.-]+)`",
        page.read_text(),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_dotted_modules_that_a_page_names_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"\bpdrun\.(?:launcher|rendezvous|parallel)(?:\.[a-z_]+)+", page.read_text()
        ):
            folder = ROOT.joinpath(*name.split(".")[1:])
            exists = folder.is_dir() or folder.with_suffix(".py").exists()
            assert exists or folder.parent.with_suffix(".py").exists(), f"{page.name}: {name}"


def test_the_site_has_every_page_once() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for one in entry.values() if isinstance(entry, dict) else ():
            for below in one if isinstance(one, list) else [one]:
                yield from pages(below)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = [page for entry in site["nav"] for page in pages(entry)]
    assert sorted(found) == sorted(
        [
            *(path.name for path in (ROOT / "docs").glob("*.md")),
            *(f"tutorial/{path.name}" for path in (ROOT / "docs/tutorial").glob("*.md")),
            "decisions/README.md",
            "api.md",  # made by scripts/site_pages.py
        ]
    )
