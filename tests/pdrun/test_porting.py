"""The ports of docs/porting.md: each adds fewer lines than it removes; the table counts them."""

import ast
import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs/porting.md").read_text()


def diffs() -> dict[str, list[str]]:
    """Title of a port -> the lines of its diff."""
    found = re.findall(r"^## (.+?)\n.*?```diff\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    return {title: lines.splitlines() for title, lines in found}


def test_the_ports_are_counted_and_shorter() -> None:
    table = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    counted = {
        title: tuple(sum(line.startswith(sign) for line in lines) for sign in "-+")
        for title, lines in diffs().items()
    }
    assert counted == {title: (int(out), int(added)) for title, out, added in table}
    assert len(counted) >= 5
    assert all(added < out for out, added in counted.values())


def test_both_sides_of_a_port_are_python() -> None:
    for lines in diffs().values():
        for sign in "-+":
            ast.parse("\n".join(line[1:] for line in lines if line[0] in f"{sign} "))
