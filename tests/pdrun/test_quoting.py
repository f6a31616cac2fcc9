"""Command lines in messages can be pasted into a shell; texts cannot control a terminal."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from pdrun.text import escape_text, quote_command

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(
    r"(?:^|[\s`(:])"
    r"(?:pdrun(?: (?:join|status|stop|logs|run|translate|slurm|token|env|warm|rank-table))?"
    r"|ssh|chmod|rm|kill|sudo|export|python3? -m|scontrol|srun|gdb|mkdir|set [A-Z_]+=)"
    r"(?:(?: [\w./+-]+)*)? ?$"
)
"""The end of a text in which the next value is a word of a command."""
NO_COMMANDS = frozenset(
    (
        *(
            "pdrun.__version__",
            "version",
            "LOCK_SECONDS",
            "readable",
            "pid",
            "socket.gethostname()",
        ),
        *("total", "backend", "name", "path"),
        *("python.target", "line or '; see pdrun mpirun --help'"),
    )
)
"""Values after the word pdrun in a sentence, numbers, and names of known modules."""


def find_commands(source: str) -> list[tuple[int, str]]:
    """Return line and value of each command line that is made without `quote_command`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            if COMMAND.search(text) and "quote" not in value and value not in NO_COMMANDS:
                found.append((part.lineno, value))
            text += "X"
    return found


def test_no_message_has_a_command_line_with_unquoted_values() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {value}"
        for folder in ("backends", "launcher", "parallel", "pdrun", "rendezvous", "ui")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, value in find_commands(path.read_text())
    ]
    assert not found, "use pdrun.text.quote_command"


@pytest.mark.parametrize(
    "source",
    ["f'try: pdrun join {place}'", "f'chmod o-w {file}'", "f'x; pdrun --scheduler {a} SCRIPT'"],
)
def test_the_search_finds_unquoted_values(source: str) -> None:
    assert find_commands(source)


@pytest.mark.parametrize("word", ["[fe80::1%eth0]:29400", "a b", "$(reboot)", "x;y", "it's", "*"])
def test_words_are_quoted(word: str) -> None:
    assert shlex.split(quote_command("pdrun", "join", word)) == ["pdrun", "join", word]


def test_plain_words_stay_as_they_are() -> None:
    assert quote_command("pdrun", "join", "10.0.0.1:29400", 7) == "pdrun join 10.0.0.1:29400 7"
    assert "\x1b" not in quote_command("rm", "\x1b[31m")


def test_a_text_cannot_control_a_terminal() -> None:
    assert escape_text("naïve ☃") == "naïve ☃"
    evil = "a\x1b[31m\x07\r\n\x9b1m\u202e\ud800"
    assert escape_text(evil) == "a\\x1b[31m\\x07\\r\\n\\x9b1m\\u202e\\ud800"
