"""
The end of a dynamic cluster's worker: nothing that it said last is lost, and nothing is waited for
too long.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, RendezvousError
from pdrun.rendezvous.clients import member as module
from pdrun.rendezvous.clients.member import DynamicMember
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Finished,
    Join,
    Leave,
    Message,
    Refuse,
    Start,
    Verdict,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.transport.zmq_util import end_context


class SlowLink:
    """A link whose scheduler reads late, or never."""

    def __init__(self, polls: int, answer: Callable[[], Sequence[Message]] = tuple) -> None:
        self.log: list[object] = []
        self._answer, self._polls = answer, polls
        self._asked = self._ended = False
        self._read, self._write = os.pipe()

    @property
    def is_confirmed(self) -> bool:
        return self._asked and self._polls <= 0

    def request_confirmation(self) -> None:
        self._asked = True

    def fileno(self) -> int:
        return self._read

    def deadline(self) -> float:
        return time.monotonic() + 0.01

    def send(self, message: Message) -> None:
        self.log.append(("read, then" if self.is_confirmed else "unread, then", type(message)))

    def poll(self) -> Sequence[Message]:
        self._polls -= self._asked
        return self._answer() if self._asked else ()

    def close(self, timeout: float) -> None:
        self.log.append("closed")
        os.close(self._write)
        os.close(self._read)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], DynamicMember]]:
    """Make the member of a link, and take back what it hangs into the interpreter."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "exit", sys.exit)
    made: list[DynamicMember] = []

    def make(link: Any) -> DynamicMember:
        made.append(
            DynamicMember(
                rank=0,
                world_size=2,
                local_rank=0,
                local_world_size=2,
                master=Endpoint("127.0.0.1", 1),
                job="j",
                run="r",
                generation=0,
                name="w",
                host="h",
                address="127.0.0.1",
                servers=0,
                server_key=b"",
                store_socket=None,
                _link=link,
                _show_line=lambda text: None,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.finish()
        atexit.unregister(one.finish)


LAST_WORDS = [("unread, then", WorkerExit), ("unread, then", Finished)]


def test_a_worker_leaves_when_its_last_words_are_read(
    member: Callable[[Any], DynamicMember],
) -> None:
    link = SlowLink(polls=20)
    member(link).finish()
    assert link.log == [*LAST_WORDS, ("read, then", Leave), "closed"]


def test_a_scheduler_that_never_reads_is_not_waited_for(
    member: Callable[[Any], DynamicMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SlowLink(polls=10**9)
    monkeypatch.setattr(module.DynamicMember._leave_job, "__defaults__", (0.3,))
    started = time.monotonic()
    member(link).finish()
    assert 0.3 <= time.monotonic() - started < 3.0
    assert link.log == [*LAST_WORDS, ("unread, then", Leave), "closed"]


def test_a_verdict_or_a_lost_scheduler_ends_the_waiting(
    member: Callable[[Any], DynamicMember],
) -> None:
    def lost() -> Sequence[Message]:
        raise RendezvousError("lost the scheduler")

    judged = SlowLink(10**9, lambda: [Verdict(0, "all 2 workers succeeded")])
    cut_off = SlowLink(10**9, lost)
    for link in (judged, cut_off):
        started = time.monotonic()
        member(link).finish()
        assert time.monotonic() - started < 3.0
    assert judged.log == [*LAST_WORDS, ("unread, then", Leave), "closed"]
    assert cut_off.log == [*LAST_WORDS, "closed"]


def test_a_context_is_ended_although_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zmq

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
    waiting = threading.Event()
    helper = threading.Thread(
        target=lambda: (waiting.wait(10), end_context(contexts[0], 0.1)), daemon=True
    )
    helper.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting.set()
    helper.join(10)
    assert contexts[0].closed, "a thread that may hang ends it itself"
    end_context(contexts[1], 0.1)
    assert not contexts[1].closed, "the main thread, which may not, leaves it"
    contexts[1].term()


def noted() -> ValueError:
    error = ValueError("bad")
    error.add_note("while step 7 was loaded")
    return error


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (
            RuntimeError("CUDA error: no access\nCompile with TORCH_USE_CUDA_DSA"),
            "RuntimeError: CUDA error: no access",
        ),
        (noted(), "ValueError: bad"),
        (KeyError(), "KeyError"),
        (RuntimeError("\n\nlate"), "RuntimeError: "),
        (SyntaxError("invalid syntax", ("t.py", 1, 5, "def (\n")), "SyntaxError: invalid syntax"),
        (ExceptionGroup("many", [ValueError("a")]), "ExceptionGroup: many (1 sub-exception)"),
    ],
)
def test_the_line_that_names_an_exception_is_its_first_not_the_last_of_its_message(
    error: Exception, summary: str
) -> None:
    assert module._cause_of_exception(type(error), error, None).summary == summary


class RefusedLink(SlowLink):
    """A link to a scheduler that refuses a process for now, and then accepts it."""

    endpoint = "h1:7777"

    def __init__(self, *polls: Sequence[Message]) -> None:
        super().__init__(0)
        self.sent: list[Message] = []
        self.renewed = 0
        self._messages = iter(polls)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def poll(self) -> Sequence[Message]:
        return next(self._messages)

    def renew(self) -> None:
        self.renewed += 1


def test_a_process_asks_again_while_an_earlier_one_of_its_name_may_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    welcome = Welcome("job", "run", "", "s" * 32, 1.0, 10.0)
    later = Refuse(78, "two workers are called 'worker-1'", retry=True)
    assign = Assign(0, 1, 2, 1, 2, 0, "h1:1")
    wish = Join("worker-1", 1, 1)
    link: Any = RefusedLink([welcome], [later], [welcome], [later], [welcome, assign, Start(0)])
    said: list[str] = []
    assert module.wait_for_start(link, wish, said.append) == (welcome, assign)
    assert link.renewed == 2 and link.sent.count(wish) == 3
    assert len(said) == 1 and "until it has ended or is found lost" in said[0]
    link.close(0.0)
    link = RefusedLink([welcome], [Refuse(78, "two workers are called 'worker-1'")])
    with pytest.raises(ConfigError, match="two workers are called"):
        module.wait_for_start(link, wish, print)
    assert not link.renewed
    link.close(0.0)
