"""
Every command of pdrun in the pages is accepted by pdrun itself: its options, their values, and the
files of this repository that it names.

A command is a line of an indented block that starts with ``$ `` or with ``pdrun``, also behind
variables and in a pipe. A block whose commands cannot be parsed (a grammar, a mistake that the page
explains) has a comment in front of it, ``<!-- not run: why -->``. Files that only the user has are
made here.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from pdrun.errors import PdrunError
from pdrun.launcher.cli.commands import build_command_line
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.translate.command_line import translate_command_line
from tests.lib.tiers import thorough

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARK = re.compile(r"^<!-- not run: (.+) -->$")
START = re.compile(r"^(?:\$ |(?:[A-Z_]+=\S+ )*(?:pdrun|scripts/\w+) (?!\[|\w+[^ -]*: ))")
OPERATORS = ("|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "{", "}")
MIN_COMMANDS = 130
MAX_MARKED = 12
HOSTS = "node1 slots=8\nnode2 slots=8\nnode3 slots=8\nnode4 slots=8\n"


class DocCommand(NamedTuple):
    """A command in a page."""

    page: str
    line: int
    words: list[str]
    """Behind ``pdrun``."""

    @property
    def label(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> Iterator[tuple[int, list[str], str]]:
    """Yield first line, lines and the reason not to run of each indented or fenced block."""
    lines = page.read_text().splitlines()
    reason, block, is_fenced = "", [], False
    for number, line in enumerate([*lines, "end"], 1):
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        if line.startswith("    ") or is_fenced or (block and not line.strip()):
            block.append(line.removeprefix("    "))
            continue
        if block:
            yield number - len(block), block, reason
            reason, block = "", []
        if found := MARK.match(line):
            reason = found[1]
        elif line.strip():
            reason = ""


def join_lines(first: int, block: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block, continued lines as one."""
    whole, begin = "", first
    for number, line in enumerate(block, first):
        if not whole:
            begin = number
            if not START.match(line):
                continue
        whole += line.removeprefix("$ ") if not whole else line.strip()
        if whole.endswith("\\"):
            whole = whole[:-1]
            continue
        yield begin, whole
        whole = ""


def split_words(text: str) -> list[str]:
    """Return the words of a line; an explanation behind three spaces is none of them."""
    lexer = shlex.shlex(re.split(r"   +", text)[0], posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind each ``pdrun`` of a line, up to an operator of the shell."""
    words: list[str] | None = None
    is_start = True
    for word in [*split_words(text), ";"]:
        if word in OPERATORS or set(word) <= set("|&;<>"):
            if words is not None:
                yield words
            words, is_start = None, True
        elif words is not None:
            words.append(word)
        elif word in ("pdrun", "scripts/matrix") or (is_start and word.startswith("scripts/")):
            words = [] if word == "pdrun" else [word]
        elif "=" not in word:
            is_start = False


def read_commands() -> tuple[list[DocCommand], list[str]]:
    """Return all commands, and the places of blocks that are marked."""
    found, marked = [], []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for first, block, reason in read_blocks(page):
            if reason:
                marked.append(f"{name}:{first}: {reason}")
                continue
            for line, text in join_lines(first, block):
                found += [DocCommand(name, line, words) for words in find_commands(text)]
    return found, marked


COMMANDS, MARKED = read_commands()


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a user whom the pages have in mind."""
    for name in ("hosts", "hostfile", "H"):
        (tmp_path / name).write_text(HOSTS)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    table = "tests/launcher/ranktables/tables/07_v1.0_16p_two_servers.json"
    (tmp_path / "hccl.json").write_bytes((ROOT / table).read_bytes())
    (tmp_path / "job.yaml").write_text("program: {script: train.py}\n")
    for name in ("train.py", "train_recommender.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(words: list[str]) -> None:
    """Let pdrun parse the words of a command."""
    context: click.Context = build_command_line().make_context("pdrun", list(words))
    command: click.Command = context.command
    while isinstance(command, click.Group):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:
            return
        name, below, args = command.resolve_command(context, rest)
        assert below is not None, words
        if name == "run":
            parse_arguments(args)
            return
        context = below.make_context(name, args, parent=context)
        command = below
    if words[0] == "translate":
        translate_command_line([word for word in words[1:] if word != "--"], {})


def is_local(command: DocCommand) -> bool:
    """Whether a command starts a job on this machine alone."""
    elsewhere = ("--scheduler", "--hosts", "--hostfile", "--rank-table", "--launcher", "--mpirun")
    words = command.words
    has_program = any(word.endswith(".py") for word in words)
    is_job = bool(words) and (words[0].startswith(("-", "examples/")) or words[0] == "train.py")
    return has_program and is_job and not any(word.startswith(elsewhere) for word in words)


@pytest.mark.parametrize(
    "command",
    [thorough(command, id=command.label) for command in COMMANDS if is_local(command)],
)
def test_a_job_of_a_page_is_planned(command: DocCommand, user_folder: Path) -> None:
    """The same command with ``--dry-run``: the plan is made. tests/e2e runs the examples."""
    done = subprocess.run(
        [sys.executable, "-m", "pdrun", "--dry-run", "--backend", "cpu", *command.words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "worker(s)" in done.stdout


def test_commands_are_found() -> None:
    assert len(COMMANDS) >= MIN_COMMANDS
    assert len(MARKED) <= MAX_MARKED, MARKED


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.label)
def test_a_command_of_a_page_is_accepted(command: DocCommand, user_folder: Path) -> None:
    words = command.words
    if words and words[0].startswith("scripts/"):
        text = (ROOT / words[0]).read_text()
        if words[0] == "scripts/test":  # the others are pytest's
            text += (ROOT / "tests/conftest.py").read_text()
        for option in [word for word in words[1:] if word.startswith("--") and word != "--"]:
            assert option.partition("=")[0] in text, f"{option} in {command.label}"
        return
    for word in words:
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), word
    if words in ([], ["--version"], ["--help"]):
        return
    try:
        parse(words)
    except click.exceptions.Exit as end:
        assert end.exit_code == 0
    except click.ClickException as error:
        pytest.fail(f"{command.label}: pdrun {shlex.join(words)}: {error.format_message()}")
    except PdrunError as error:
        pytest.fail(f"{command.label}: pdrun {shlex.join(words)}: {error}")
