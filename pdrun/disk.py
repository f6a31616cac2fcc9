"""
Disk access: private folders, and calls that may never return.

On a network file system without its server, a call blocks for any length of time.
`BackgroundCall` makes it in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


def make_private_folder(folder: Path) -> None:
    """
    Create a folder and its missing parents, all with mode 0700. An existing folder is unchanged.

    `Path.mkdir` applies the mode to the last folder only.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


class BackgroundCall(Generic[T]):
    """
    A call that runs in a daemon thread. The caller may wait for it or abandon it.

    The thread ends with the process, even if the call never returns. If no thread can be started
    (a limit on processes), the constructor makes the call itself.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        try:
            threading.Thread(target=self._run_call, name="pdrun-call", daemon=True).start()
        except RuntimeError:
            self._run_call()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for at most ``seconds`` (None: no limit); return whether the call has ended."""
        return self._done.wait(seconds)

    def result(self) -> T:
        """Wait for the call; return its value or raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run_call(self) -> None:
        try:
            self._values.append(self._call())
        except BaseException as error:  # `result` raises it
            self._error = error
        self._done.set()
