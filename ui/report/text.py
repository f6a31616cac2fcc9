"""Text of other machines on a page: escaped, bounded, secrets blanked."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from pdrun.text import escape_text

MAX_TEXT_LENGTH = 20_000
_TOKEN = re.compile(r"pdrun1-[A-Z0-9]+(?:-[A-Z0-9]+)*(?:-[0-9a-f]+)?")
_SECRET_NAME = re.compile(
    r"(?i)\b([A-Z0-9_.-]*(?:token|secret|password|passwd|api_?key|access_?key|private_?key|_key))"
    r"(['\"]?\s*[=:]\s*['\"]?)([^\s'\",;&]+)"
)
BLANK = "[blanked]"


def blank_secrets(text: str) -> str:
    """Return a text without tokens of pdrun and without values of variables named like secrets."""
    text = _TOKEN.sub(BLANK, text)
    return _SECRET_NAME.sub(lambda match: f"{match[1]}{match[2]}{BLANK}", text)


def clean_line(text: object) -> str:
    """Return one line for HTML: secrets blanked, control and direction characters escaped."""
    line = escape_text(blank_secrets(" ".join(str(text)[:MAX_TEXT_LENGTH].split())))
    return html.escape(line)


def clean_block(text: object) -> str:
    """Return several lines for a ``pre`` element."""
    lines = blank_secrets(str(text)[-MAX_TEXT_LENGTH:]).splitlines()
    return html.escape("\n".join(escape_text(line.expandtabs(4)) for line in lines))


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; without a head, the first cell of each row is one."""
    lines = ['<div class="table"><table>']
    if head:
        lines.append("<tr>" + "".join(f"<th>{clean_line(cell)}</th>" for cell in head) + "</tr>")
    for row in rows:
        first, *rest = row
        cells = "".join(f"<td>{clean_line(cell)}</td>" for cell in rest)
        tag = "td" if head else "th"
        lines.append(f"<tr><{tag}>{clean_line(first)}</{tag}>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])
