"""The screen of `pdrun top`: tabs of rows, of which only the visible ones become text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from pdrun.text import escape_text
from pdrun.ui.job_status import JobStatus
from pdrun.ui.report.numbers import StepRow
from pdrun.ui.top import model as top_model
from pdrun.ui.top.model import TopModel

REFRESH_SECONDS = 0.5
STOP = "stop"
"""Result of the screen: the user wants to stop the job."""
_COLOURS = {
    "running": "green",
    "done": "green",
    "joined": "cyan",
    "standby": "cyan",
    "suspect": "yellow",
    "stopped": "yellow",
    "lost": "red",
    "failed": "red",
}

Cells = tuple[str, ...]
ReadStatus = Callable[[], JobStatus]
ReadLog = Callable[[int], Sequence[str]]


class RowView(ScrollView):
    """Rows of which only the visible ones are formatted, and a cursor."""

    can_focus = True
    DEFAULT_CSS = "RowView { height: 1fr; }"
    BINDINGS: ClassVar[list[Any]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-20)", show=False),
        Binding("pagedown", "move(20)", show=False),
        Binding("home", "move(-1000000000)", show=False),
        Binding("end", "move(1000000000)", show=False),
    ]

    def __init__(self, head: Cells, widths: Sequence[int], **options: Any) -> None:
        """``widths``: columns of each cell; 0: the rest of the line."""
        super().__init__(**options)
        self._head = head
        self._widths = widths
        self._rows: Sequence[Any] = ()
        self._format: Callable[[Any], Cells] = lambda row: row
        self.cursor = 0

    @property
    def selected(self) -> Any:
        """The row under the cursor; None: there are no rows."""
        return self._rows[self.cursor] if self.cursor < len(self._rows) else None

    def set_rows(self, rows: Sequence[Any], format_row: Callable[[Any], Cells]) -> None:
        """Show other rows; the cursor stays where it is."""
        self._rows, self._format = rows, format_row
        self.cursor = max(0, min(self.cursor, len(rows) - 1))
        self.virtual_size = Size(max(self.size.width, 20), len(rows) + 1)
        self.refresh()

    def action_move(self, count: int) -> None:
        """Move the cursor, and scroll to it."""
        self.cursor = max(0, min(self.cursor + count, len(self._rows) - 1))
        top, height = self.scroll_offset.y, max(1, self.size.height - 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return a line of the widget: the head, or a row."""
        width = self.size.width
        index = y - 1 + self.scroll_offset.y
        if y == 0:
            return self._make_strip(self._head, width, Style(bold=True))
        if index >= len(self._rows):
            return Strip.blank(width, Style())
        is_chosen = index == self.cursor and self.has_focus
        return self._make_strip(self._format(self._rows[index]), width, Style(reverse=is_chosen))

    def _make_strip(self, cells: Cells, width: int, style: Style) -> Strip:
        segments = []
        for cell, columns in zip(cells, self._widths, strict=True):
            colour = _COLOURS.get(cell)
            text = f"{set_cell_size(cell, columns)} " if columns else cell
            segments.append(Segment(text, style + Style(color=colour) if colour else style))
        return Strip(segments).adjust_cell_length(width, style)


class TopApp(App[str]):
    """One job. It returns STOP if the user wants to stop it."""

    TITLE = "pdrun top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 2; }
    #filter { display: none; dock: bottom; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", "quit"),
        Binding("tab", "turn(1)", "next tab", priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        Binding("right", "turn(1)", show=False),
        Binding("left", "turn(-1)", show=False),
        Binding("slash", "filter", "filter"),
        Binding("l", "show_log", "log of the rank"),
        Binding("f", "pause", "follow"),
        Binding("x", "ask_stop", "stop the job"),
        Binding("escape", "clear", show=False),
    ]

    def __init__(
        self,
        read_status: ReadStatus,
        read_log: ReadLog,
        read_past: Callable[[], Iterable[StepRow]] = lambda: (),
        *,
        can_stop: bool = False,
    ) -> None:
        """
        Args:
            read_status: returns the newest status; called in a thread.
            read_log: returns the last lines of a rank.
            read_past: returns the steps before the newest status; called once, in a thread.
            can_stop: whether the job can be stopped from here.
        """
        super().__init__()
        self._read_status = read_status
        self._read_log = read_log
        self._read_past: Callable[[], Iterable[StepRow]] | None = read_past
        self._can_stop = can_stop
        self._model = TopModel()
        self._text = ""
        self._is_following = True
        self._is_reading = False
        self._is_asking = False
        self._log_rank: int | None = None
        self._log_lines: Sequence[str] = ()
        self.frame_seconds = 0.0
        """Time that the last update of the rows took."""

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static("", id="head", markup=False)
        with TabbedContent(id="tabs"):
            with TabPane("Nodes", id="nodes"):
                yield RowView(top_model.NODE_HEAD, top_model.NODE_WIDTHS, id="node-rows")
            with TabPane("Ranks", id="ranks"):
                yield RowView(top_model.RANK_HEAD, top_model.RANK_WIDTHS, id="rank-rows")
            with TabPane("Messages", id="messages"):
                yield RowView(("",), (0,), id="message-rows")
            with TabPane("Curves", id="curves"):
                yield RowView(top_model.CURVE_HEAD, top_model.CURVE_WIDTHS, id="curve-rows")
            with TabPane("Log", id="log"):
                yield RowView(("",), (0,), id="log-rows")
        yield Input(placeholder="part of a name, a rank or a state", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Read the status now, and then again and again."""
        self.set_interval(REFRESH_SECONDS, self._start_reading)
        self._start_reading()
        self.query_one("#node-rows", RowView).focus()

    def _start_reading(self) -> None:
        """Read the status in a thread, unless the last reading still waits for its answer."""
        if self._is_following and not self._is_reading:
            self._is_reading = True
            self.run_worker(self._read_now, thread=True)

    def _read_now(self) -> None:
        try:
            if self._read_past is not None:
                self._model.seed(self._read_past())
                self._read_past = None
            status = self._read_status()
        finally:
            self._is_reading = False
        self.call_from_thread(self.show_status, status)

    def show_status(self, status: JobStatus) -> None:
        """Show a status."""
        begin = time.perf_counter()
        has_changed = self._model.update(status)
        self.query_one("#head", Static).update(
            "\n".join(self._model.head(time.time(), max(20, self.size.width - 1)))
        )
        if has_changed:
            self._show_rows()
        self.frame_seconds = time.perf_counter() - begin

    def on_tabbed_content_tab_activated(self) -> None:
        """Show the rows of the tab that was chosen."""
        self._show_rows()

    def _show_rows(self) -> None:
        """Fill the active tab."""
        model, text = self._model, self._text
        active = self.query_one(TabbedContent).active
        if active == "nodes":
            self._fill("node", model.nodes(text), model.format_node)
        elif active == "ranks":
            self._fill("rank", model.ranks(text), model.format_rank)
        elif active == "messages":
            self._fill("message", model.messages(text), lambda line: (line,))
        elif active == "curves":
            width = max(10, self.size.width - sum(top_model.CURVE_WIDTHS) - 6)
            self._fill("curve", model.curve_rows(width), lambda cells: cells)
        elif active == "log":
            shown = [line for line in self._log_lines if not text or text in line]
            self._fill("log", shown, lambda line: (line,))

    def _fill(self, name: str, rows: Sequence[Any], form: Callable[[Any], Cells]) -> None:
        self.query_one(f"#{name}-rows", RowView).set_rows(rows, form)

    # ---- keys ----------------------------------------------------------------

    def action_filter(self) -> None:
        """Ask for a text that rows must contain."""
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._text = event.value
        self._show_rows()

    def on_input_submitted(self) -> None:
        """Go back to the rows."""
        self.query_one("#filter", Input).display = False
        self._focus_rows()

    def _focus_rows(self) -> None:
        active = self.query_one(TabbedContent).active_pane
        if active is not None:
            active.query_one(RowView).focus()

    def action_turn(self, count: int) -> None:
        """Show the tab that is ``count`` further."""
        tabs = self.query_one(TabbedContent)
        names = [pane.id or "" for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + count) % len(names)]
        self._show_rows()
        self._focus_rows()

    def action_clear(self) -> None:
        """Remove the filter, or do not stop the job."""
        self._is_asking = False
        self.query_one("#filter", Input).value = ""
        self.on_input_submitted()

    def action_show_log(self) -> None:
        """Show the last lines of the rank under the cursor, or of the node's first rank."""
        tabs = self.query_one(TabbedContent)
        pane = tabs.active_pane
        row = pane.query_one(RowView).selected if pane is not None else None
        rank = getattr(row, "rank", None)
        if rank is None:
            rank = self._model.first_ranks.get(getattr(row, "name", ""), self._log_rank or 0)
        self._log_rank = rank
        lines = self._read_log(rank) or ["no lines, or the log is on another host"]
        self._log_lines = [f"rank {rank}:", *(escape_text(line) for line in lines)]
        tabs.active = "log"
        self._show_rows()
        self._focus_rows()

    def action_pause(self) -> None:
        """Stop following, or follow again."""
        self._is_following = not self._is_following
        self.notify("following" if self._is_following else "paused")

    def action_ask_stop(self) -> None:
        """Stop the job when x is pressed twice."""
        if not self._can_stop or self._model.status.state in ("done", "dead"):
            self.notify("this job cannot be stopped from here")
        elif self._is_asking:
            self.exit(STOP)
        else:
            self._is_asking = True
            self.notify("press x again to stop the job, Esc to let it run")
