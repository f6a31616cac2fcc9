"""
A call to a disk, in a thread of its own: on a network file system without its server it may never
come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """
    ``call`` under way. Whoever made it waits as long as it likes, and may leave it alone.

    The thread is a daemon: it ends with the process, however long the disk takes.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        try:
            threading.Thread(target=self._run_call, name="pdrun-attempt", daemon=True).start()
        except RuntimeError:  # no thread to be had: a limit on processes
            self._run_call()

    def wait(self, seconds: float | None = None) -> bool:
        """
        Wait for its end, for at most ``seconds`` (None: for ever); return whether it has ended.
        """
        return self._done.wait(seconds)

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; waits for its end."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run_call(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        self._done.set()
