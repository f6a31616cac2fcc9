"""The full screen, on terminals of several sizes that are programs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("textual")

from pdrun.ui.job_status import JobStatus
from pdrun.ui.top.app import STOP, RowView, TopApp
from tests.ui.top.test_model import job

LOG = ["step 1", "\x1b[31mred\x1b[0m", "\u202eevil"]


def drive(
    status: JobStatus, size: tuple[int, int], steps: Callable[[TopApp, Any], Awaitable[None]]
) -> TopApp:
    """Run the screen of a job, and what a user does there."""

    async def run() -> TopApp:
        app = TopApp(lambda: status, lambda rank: [f"of {rank}", *LOG], can_stop=True)
        async with app.run_test(size=size) as pilot:
            deadline = time.monotonic() + 30
            while app._model.status is not status:
                assert time.monotonic() < deadline
                await pilot.pause(0.01)
            app._is_following = False
            await pilot.pause()
            await steps(app, pilot)
        return app

    return asyncio.run(run())


def shown(app: TopApp) -> str:
    """Return the text of the screen."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line) for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (300, 100)])
def test_tabs(size: tuple[int, int]) -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        text = shown(app)
        assert "j (r)  running" in text and "n7" in text and "lost" in text
        assert all(len(line) == size[0] for line in text.splitlines())
        app.query_one("TabbedContent").active = "ranks"
        await pilot.pause()
        text = shown(app)
        assert r"ValueError: \x1b[2J<script>" in text and "failed" in text, text
        app.query_one("#rank-rows").focus()
        await pilot.press("l")
        await pilot.pause()
        text = shown(app)
        assert "rank 3:" in text and "of 3" in text
        assert "\x1b" not in text and "\u202e" not in text

    drive(job(10), size, steps)


def test_keys_turn_the_tabs_and_the_footer_names_them_all() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        assert all(word in shown(app) for word in ("next tab", "log of the rank", "stop the job"))
        seen = []
        for key in ("tab", "tab", "right", "right", "tab", "left", "shift+tab"):
            await pilot.press(key)
            await pilot.pause()
            seen.append(app.query_one("TabbedContent").active)
        assert seen == ["ranks", "messages", "curves", "log", "nodes", "log", "curves"]
        await pilot.press("tab", "tab", "tab", "down", "l")
        await pilot.pause()
        assert "rank " in shown(app) and app.focused is app.query_one("#log-rows")

    drive(job(10), (80, 24), steps)


def test_filter_cursor_and_stop() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        rows = app.query_one("#node-rows", RowView)
        await pilot.press("end")
        assert rows.selected.name == "n39"
        await pilot.press("home", "down")
        assert rows.selected.name == "n0"
        await pilot.press("slash", "n", "1", "2", "enter")
        assert [node.name for node in rows._rows] == ["n12"]
        await pilot.press("escape")
        assert len(rows._rows) == 40
        await pilot.press("x", "escape", "x")
        assert app.return_value is None
        await pilot.press("x")

    assert drive(job(40), (80, 24), steps).return_value == STOP


def test_a_job_of_12500_nodes_is_drawn_in_time() -> None:
    async def steps(app: TopApp, pilot: Any) -> None:
        seconds = []
        for number in range(5):
            other = job(12_500, step=number, step_at=float(number + 1))
            begin = time.thread_time()
            app.show_status(other)
            shown(app)
            seconds.append(time.thread_time() - begin)
        print(f"{min(seconds) * 1e3:.0f} ms of CPU per frame")
        assert min(seconds) < 0.5  # benchmarks/screens.py has the figure

    drive(job(12_500), (300, 100), steps)


def test_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")

    async def steps(app: TopApp, pilot: Any) -> None:
        assert "n7" in shown(app)

    drive(job(10), (80, 24), steps)
