"""
Threads of which exactly one runs at a time, in a fixed order: the one that has the turn.

A thread runs until it calls `yield_turn`. The next thread in the round then continues where it had
yielded. What is computed, and in which order, depends on the program only, and is the same in every
process that runs the same program. Global variables that belong to a thread are saved and restored
at each switch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Cancelled(BaseException):
    """Ends a thread after another one has failed; it is never raised to the caller."""


class TurnTaking:
    """
    One round.

    Args:
        count: threads.
        save_state: called in a thread that is about to yield; returns its global state.
        restore_state: called in a thread that has the turn again, with what ``save_state``
            returned.
    """

    def __init__(
        self, count: int, save_state: Callable[[], Any], restore_state: Callable[[Any], None]
    ) -> None:
        self._turn = 0
        self._alive = [True] * count
        self._save_state = save_state
        self._restore_state = restore_state
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.local()
        self.switches = 0
        """How often the turn has passed from one thread to another."""

    def yield_turn(self) -> None:
        """Let the other threads run until they yield too; no effect in a thread of another kind."""
        index = getattr(self._thread, "index", None)
        if index is None or sum(self._alive) == 1:
            return
        kept = self._save_state()
        self._pass_turn(index)
        self._wait_for_turn(index)
        self._restore_state(kept)

    def run_all(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """
        Run one function per thread, the first in the caller's; return their results.

        Raises:
            BaseException: the first error of any of them; the others are then ended where they
                yielded.
        """
        results: list[Any] = [None] * len(functions)
        begin = self._save_state()

        def work(index: int) -> None:
            self._thread.index = index
            try:
                self._wait_for_turn(index)
                self._restore_state(begin)
                results[index] = functions[index]()
            except Cancelled:
                pass
            except BaseException as error:
                with self._change:
                    self._error = self._error or error
            finally:
                del self._thread.index
                self._alive[index] = False
                self._pass_turn(index)

        threads = [
            threading.Thread(target=work, args=(i,), name=f"pdrun-copy-{i}")
            for i in range(1, len(functions))
        ]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def _pass_turn(self, index: int) -> None:
        """Give the turn to the next thread in the round that has not ended."""
        with self._change:
            count = len(self._alive)
            coming = [(index + step) % count for step in range(1, count + 1)]
            self._turn = next((place for place in coming if self._alive[place]), index)
            self.switches += self._turn != index
            self._change.notify_all()

    def _wait_for_turn(self, index: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._turn == index or self._error is not None)
            if self._error is not None:
                raise Cancelled
