"""
What the agent says on the terminal, and when: one line a fact, each behind ``pdrun: ``, nothing for
its own sake.

Where several agents share a terminal (`--local`) one of them speaks for the job; the others say
only what is about their own node. What the scheduler's process notes about strangers and other
nodes is read from the event log.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdrun import async_writer
from pdrun.background_call import BackgroundCall
from pdrun.clock import Clock
from pdrun.endpoint import parse_endpoint
from pdrun.launcher.agent.interfaces import WorkerOutput
from pdrun.launcher.agent.summary import duration, plain, summary
from pdrun.launcher.common.network import is_loopback
from pdrun.launcher.common.ranks import RankSet
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import Assign, Failure, StopWorkers, Verdict, Waiting

LOOK_EVERY = 0.5
"""Seconds between two looks into the event log."""
READING = 0.1
"""Seconds that a look waits for the disk."""
PATIENCE = 1.0
"""
Seconds after which it is said why the workers are being stopped; a quicker end says it in its
summary.
"""
NOTICE_LINES = 100
TWICE = 5.0
"""Seconds in which a line from two sources is said once."""
COMING = 5.0
"""Seconds in which nodes that mpirun or a front is starting are not called missing."""
_SHOWN = ("warning", "refused", "suspect", "recovered")


class Voice:
    """
    Speaks through the workers' output once there is one, and waits for no reader before either.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        quiet: bool,
        address: str,
        events: str = "",
        before: Callable[[str], None] = async_writer.write_message,
    ) -> None:
        """
        Args:
            before: says a line while there is no output yet; must not block.
            quiet: another agent on this terminal says what is said once a job.
            address: ``HOST:PORT`` by which other nodes join.
            events: path of an event log that another process writes and this one shows; empty:
                none.
        """
        self._clock = clock
        self._quiet = quiet
        self._address = address
        self._output: WorkerOutput | None = None
        self._before = before
        self._events = _EventTail(Path(events)) if events else None
        self._look_at = clock.monotonic()
        self._began = clock.monotonic()
        self._later: tuple[float, str] | None = None
        self._told_token = False
        self._standby = ""
        self._noticed = ""
        self._told: deque[tuple[float, str]] = deque(maxlen=2 * NOTICE_LINES)
        self._why = ""
        """Why the workers of the last generation were stopped."""
        self._restarts = 0
        self._world = 0
        self._log_dir = ""
        self._plan: LaunchPlan | None = None

    def say(self, text: str) -> None:
        """Say a line, whoever else speaks."""
        if self._output is not None:
            self._output.say(f"pdrun: {text}")
        else:
            self._before(text)

    def begin(self, plan: LaunchPlan, run: str, output: WorkerOutput) -> None:
        """The run has a name: from here on lines go through the output."""
        self._plan = plan
        self._output = output
        if plan.spec.output.files:
            folder = Path(plan.cwd, plan.spec.output.log_dir, run)
            here = Path.cwd()
            self._log_dir = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)

    def deadline(self) -> float | None:
        """When `look` is due."""
        times = [self._look_at] if self._events else []
        return min([*times, self._later[0]] if self._later else times, default=None)

    def look(self) -> None:
        """Say what has become due, and what has been added to the event log."""
        now = self._clock.monotonic()
        if self._later is not None and now >= self._later[0]:
            self.say(self._later[1])
            self._later = None
        if self._events is None or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY
        for event in self._events.more():
            if event.get("kind") in _SHOWN and not self._known(str(event.get("text", ""))):
                words = [
                    str(event[key]) for key in ("node", "host", "text", "reason") if event.get(key)
                ]
                self.say(plain(f"{event['kind']}: {', '.join(dict.fromkeys(words))}"))

    def waiting(self, message: Waiting) -> None:
        """
        Who is here, who is not, and how to start them; nodes that one command starts are on their
        way at first.
        """
        simulated = self._plan is not None and self._plan.spec.place.simulated is not None
        coming = not self._address and message.elapsed < (PATIENCE if simulated else COMING)
        if self._quiet or coming:
            return
        here = message.here or len(message.present)
        names = ", ".join((*message.present, *(["..."] if here > len(message.present) else [])))
        least = self._plan.spec.resources.least if self._plan is not None else message.expected
        if here >= least:  # enough to begin: more are welcome, and nothing is missing
            rest = f"; they begin in {duration(max(0.0, message.timeout - message.elapsed))} unless more come"
        else:
            spent = f"{duration(message.elapsed)} of {duration(message.timeout)}"
            rest = f", missing: {', '.join(message.missing)}; {spent}"
        self.say(
            plain(f"{here} of {message.expected} nodes are here ({names}){rest}")
            + self._how_to_join()
        )

    def standing_by(self, reason: str) -> None:
        """This node has no part in the present generation; said again when the reason changes."""
        if reason != self._standby:
            self._standby = reason
            self.say(plain(f"{self._plan.node if self._plan else 'this node'} stands by: {reason}"))

    def notice(self, text: str) -> None:
        """The scheduler tells something to everybody."""
        self._noticed = text
        for line in text.splitlines()[:NOTICE_LINES]:
            if (
                line.startswith(" ") or not self._known(line)
            ) and not self._quiet:  # stacks may have equal lines
                self.say(plain(line))

    def _known(self, text: str) -> bool:
        """
        Whether a line was said a moment ago: what the scheduler tells stands in its event log, too.
        Notes it.
        """
        now = self._clock.monotonic()
        known = any(before == text and now - at < TWICE for at, before in self._told)
        if text:
            self._told.append((now, text))
        return known and bool(text)

    def _how_to_join(self) -> str:
        """
        How the missing nodes are started; once, too, where they get the token that a shared home
        would give.
        """
        if not self._address:
            return ""
        place = self._plan.spec.place if self._plan is not None else None
        line = f"; start each with: {self._join_line()}"
        here = is_loopback(parse_endpoint(self._address, where="scheduler").host)
        if self._told_token or here or (place is not None and place.insecure):
            return line
        self._told_token = True
        own = (
            "of this node's --token-file"
            if place is not None and place.token_file
            else "of `pdrun token show` here"
        )
        return f"{line} (a host that does not share this home needs the token {own})"

    def _join_line(self) -> str:
        insecure = self._plan is not None and self._plan.spec.place.insecure
        return f"pdrun join {'--insecure ' * insecure}{self._address}"

    def started(self, assign: Assign) -> None:
        """The workers start: how many, the first time and whenever that has changed."""
        self._standby = ""
        before = self._world
        self._world = assign.world_size
        if self._quiet or self._plan is None or before == assign.world_size:
            return
        shown = self._plan.spec.output.show_ranks
        if none := RankSet(shown).without(range(assign.world_size)):
            there = (
                f"the ranks are 0-{assign.world_size - 1}"
                if assign.world_size > 1
                else "the only rank is 0"
            )
            self.say(f"warning: --show-ranks {shown}: there is no rank {none}; {there}")
        workers = f"{assign.world_size} worker{'s' if assign.world_size > 1 else ''}"
        nodes = f"{assign.nodes} node{'s' if assign.nodes > 1 else ''}"
        logs = f", logs in {self._log_dir}" if self._log_dir else ""
        self.say(f"{workers} on {nodes}, {self._plan.backend}{logs}")
        if self._plan.spec.resources.elastic and self._address and not before:
            self.say(f"further nodes may join with: {self._join_line()}")

    def stopping(self, message: StopWorkers) -> None:
        """Somebody failed: why, unless it is all over in a moment."""
        self._why = message.reason
        if not self._quiet and not message.reason.startswith("stopped by"):
            text = plain(
                f"{message.reason}; stopping the other workers (grace {duration(message.grace)})"
            )
            self._later = (self._clock.monotonic() + PATIENCE, text)

    def restarting(self, assign: Assign) -> None:
        """A new generation begins, after a failure or because nodes came or went; says why."""
        self._later = None
        if not self._quiet and self._plan is not None:
            counted = assign.restarts > self._restarts
            most = self._plan.spec.policy.max_restarts
            what = f"restart {assign.restarts} of {most}" if counted else "starting again"
            size = (
                f" with {assign.nodes} node{'s' * (assign.nodes > 1)}"
                if self._plan.spec.resources.elastic
                else ""
            )
            self.say(plain(f"{what}{size}{f': {self._why}' if self._why else ''}"))
        self._restarts = assign.restarts
        self._why = ""

    def stop_asked(
        self, name: str, grace: float, *, again: bool, running: bool, leaves: bool = False
    ) -> None:
        """The user wants the job to end, or this node to leave it."""
        node = self._plan.node if self._plan else "this node"
        if leaves and again:
            self.say(f"{name} again: killing all workers of {node}")
        elif leaves:
            once_more = (
                f", grace {duration(grace)}; once more kills its workers at once" if running else ""
            )
            self.say(f"{name}: {node} leaves the job, which goes on without it{once_more}")
        elif self._quiet:
            return
        elif again:
            self.say(f"{name} again: killing all workers")
        elif running:
            self.say(f"{name}: stopping the job, grace {duration(grace)}; once more kills at once")

    def verdict(self, verdict: Verdict) -> None:
        """The end."""
        self._later = None
        self.look()
        if not self._quiet:
            for line in summary(
                verdict,
                seconds=self._clock.monotonic() - self._began,
                log_dir=self._log_dir,
                python=self._python(verdict),
                revealed=self._revealed(verdict),
            ):
                self.say(line)

    def _here(self, failure: Failure | None) -> LaunchPlan | None:
        """The plan, when a failure was on this machine: of this node, or one that it simulates."""
        plan = self._plan
        if plan and failure and (plan.node == failure.node or plan.spec.place.simulated):
            return plan
        return None

    def _python(self, verdict: Verdict) -> str:
        plan = self._here(verdict.first)
        if plan and plan.workers and plan.spec.program.kind != "command":
            return plan.workers[0].argv[0]
        return ""

    def _revealed(self, verdict: Verdict) -> bool:
        """
        Whether the first cause's last lines (for --show-ranks hides that rank), or a hang's stacks,
        were shown.
        """
        plan = self._here(verdict.first)
        first = verdict.first
        if first is not None and first.cause.kind == "hang":
            return bool(first.cause.traceback) and first.cause.traceback in self._noticed
        return (
            plan is not None
            and first is not None
            and first.rank not in RankSet(plan.spec.output.show_ranks)
        )

    def left(self, code: int) -> None:
        """The end without a verdict; why was said before."""
        if not self._quiet:
            self.say(f"exit code {code}" + (f", logs in {self._log_dir}" if self._log_dir else ""))


class _EventTail:
    """Reads what is added to a file of JSON lines, on a disk that may hang."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._half = b""
        self._reading: BackgroundCall[bytes] | None = None

    def more(self) -> list[dict[str, Any]]:
        """
        Return what is new; nothing while the disk does not answer, which is waited for a moment,
        once.
        """
        first = self._reading is None
        self._reading = self._reading or BackgroundCall(self._read)
        if not self._reading.wait(READING if first else 0.0):
            return []
        data = self._reading.result()
        self._reading = None
        self._at += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                return file.read(1 << 20)
        except OSError:
            return b""
