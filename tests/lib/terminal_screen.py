"""
A terminal without a window: the bytes that a program writes become rows of text.

It knows what pdrun's screens use: lines, wrapping, cursor movement, erasing, insert and delete of
lines, the alternate screen. What it does not know it counts, so that a test can refuse it.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"\x1b\[(?P<args>[0-9;:?<>=!]*)(?P<gap>[ -/]*)(?P<final>[@-~])"
    r"|\x1b\](?P<osc>[^\x07\x1b]*)(?:\x07|\x1b\\)"
    r"|\x1b(?P<short>[()][0-9A-Za-z]|[=>78cDEHMNOPZ])"
)
_IGNORED = frozenset("mhlrqtpuscn")
"""Colours, modes, regions, titles, questions: nothing that moves text here."""


class TerminalScreen:
    """Rows of text, and a cursor."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.unknown: list[str] = []
        """Sequences that have no meaning here."""
        self.history: list[str] = []
        """Rows that were scrolled out."""
        self._rest = ""
        self._clear()

    def feed(self, text: str) -> None:
        """Write text, which may end within a sequence."""
        text = self._rest + text
        self._rest = ""
        index = 0
        while index < len(text):
            char = text[index]
            if char == "\x1b":
                found = _SEQUENCE.match(text, index)
                if found is None:
                    if len(text) - index < 64:
                        self._rest = text[index:]
                        return
                    self.unknown.append(text[index : index + 8])
                    index += 1
                    continue
                self._apply_sequence(found)
                index = found.end()
                continue
            self._write(char)
            index += 1

    def lines(self) -> list[str]:
        """Return the rows without spaces at their ends, and without empty rows at the end."""
        found = ["".join(row).rstrip() for row in self._grid]
        while found and not found[-1]:
            found.pop()
        return found

    def text(self) -> str:
        """Return all that was ever on the screen, scrolled out rows first."""
        return "\n".join([*self.history, *self.lines()])

    def _clear(self) -> None:
        self._grid = [[" "] * self.columns for _ in range(self.rows)]
        self._row = self._column = 0

    def _write(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._move_down()
        elif char == "\b":
            self._column = max(0, self._column - 1)
        elif char >= " ":
            if self._column >= self.columns:
                self._column = 0
                self._move_down()
            self._grid[self._row][self._column] = char
            self._column += 1
        elif char not in "\x07\t\x0e\x0f":
            self.unknown.append(char)

    def _move_down(self) -> None:
        if self._row + 1 < self.rows:
            self._row += 1
            return
        self.history.append("".join(self._grid.pop(0)).rstrip())
        self._grid.append([" "] * self.columns)

    def _apply_sequence(self, found: re.Match[str]) -> None:
        final = found["final"]
        if final is None or found["args"][:1] in ("?", ">", "<", "=") or found["gap"]:
            if found["args"] in ("?1049", "?47") and final == "h":
                self._clear()
            return
        counts = [int(part) if part.isdecimal() else 0 for part in found["args"].split(";")]
        count = max(1, counts[0])
        row, column = self._row, min(self._column, self.columns - 1)
        match final:
            case "A" | "B":
                self._row = min(self.rows - 1, max(0, row + (count if final == "B" else -count)))
            case "C" | "D":
                step = count if final == "C" else -count
                self._column = min(self.columns - 1, max(0, column + step))
            case "G":
                self._column = min(self.columns, count) - 1
            case "H" | "f":
                self._row = min(self.rows, count) - 1
                second = counts[1] if len(counts) > 1 else 1
                self._column = min(self.columns, max(1, second)) - 1
            case "J":
                self._erase(row, column, counts[0], whole=True)
            case "K":
                self._erase(row, column, counts[0], whole=False)
            case _ if final not in _IGNORED:
                self.unknown.append(found[0])

    def _erase(self, row: int, column: int, kind: int, *, whole: bool) -> None:
        begin = 0 if kind else column
        end = column + 1 if kind == 1 else self.columns
        self._grid[row][begin:end] = [" "] * (end - begin)
        if whole:
            rows = range(row + 1, self.rows) if kind == 0 else range(row)
            for other in rows if kind < 2 else range(self.rows):
                self._grid[other] = [" "] * self.columns
