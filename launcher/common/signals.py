"""
Signals as events: they wake the agent's loop through a descriptor. No work is done in a handler.

    SIGINT SIGTERM SIGQUIT SIGHUP      stop the job: the first with grace, the second immediately
    SIGUSR1 SIGUSR2 SIGWINCH SIGCONT   forwarded to the workers; the job continues
    SIGTSTP                            Ctrl-Z: see `Agent`
    SIGPIPE                            ignored: a closed terminal is an error of `write`

Signals that are inherited as ignored stay ignored: SIGHUP of nohup, SIGINT of a background job.

Limit: Python delivers signals to the main thread only. In another thread (`launch` called from a
thread) no signal is handled, and the caller's handlers stay.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from pdrun import process_setup

STOP_SIGNALS = process_setup.STOP_SIGNALS
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)
_HANDLED_SIGNALS = (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGTSTP)


class SignalReceiver:
    """
    Handles signals inside a ``with`` block and restores the old handlers after it.

    In a pdrun process signals are ignored after the block, so that none disturbs the exit.
    """

    def __init__(self) -> None:
        self._read = -1
        self._write = -1
        self._previous: dict[int, object] = {}
        self._wakeup = -1

    def __enter__(self) -> SignalReceiver:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _HANDLED_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, _do_nothing)
        self._previous[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, process_setup.handler_after(handler))  # type: ignore[arg-type]
        if self._previous:
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return the descriptor to poll for `read_signals`."""
        return self._read

    def read_signals(self) -> list[int]:
        """Return the numbers of received signals, oldest first; never blocks."""
        try:
            return [number for number in os.read(self._read, 512) if number in _HANDLED_SIGNALS]
        except BlockingIOError:
            return []

    @staticmethod
    def suspend_process() -> None:
        """Stop this process as Ctrl-Z does; returns when it is continued."""
        os.kill(os.getpid(), signal.SIGSTOP)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor already has the number."""


def format_signal(number: int) -> str:
    """Return ``SIGSEGV`` for 11; ``signal N`` for real-time and unknown ones."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
