"""
What the agent prints on the terminal, and when: one line per fact, with the prefix ``pdrun: ``.

If several agents share a terminal (`--local`), one of them prints what concerns the whole job. The
others print only what concerns their own node. Notes of the scheduler process about other nodes and
unknown clients are read from the event log.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pdrun import async_writer
from pdrun.clock import Clock
from pdrun.endpoint import parse_endpoint
from pdrun.errors import EXIT_OK
from pdrun.launcher.agent.event_tail import EventTail
from pdrun.launcher.agent.interfaces import WorkerOutput
from pdrun.launcher.agent.summary import format_duration, format_summary, sanitize_line
from pdrun.launcher.common.network import is_loopback
from pdrun.launcher.common.rank_lists import RankSet, describe_ranks
from pdrun.launcher.common.termination_log import termination_log_path, write_termination_log
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import Assign, Failure, StopWorkers, Verdict, Waiting
from pdrun.text import plural, quote_command

EVENT_LOG_SECONDS = 0.5
"""Time between two reads of the event log."""
ANNOUNCE_DELAY_SECONDS = 1.0
"""Delay of the reason why workers are stopped. If the job ends earlier, its summary has it."""
MAX_NOTICE_LINES = 100
REPEAT_SECONDS = 5.0
"""A line that comes from two sources within this time is printed once."""
STARTUP_SECONDS = 5.0
"""Nodes that mpirun or a controller starts are not called missing before this time."""
_SHOWN_KINDS = ("warning", "refused", "suspect", "recovered")


class Announcer:
    """Prints through the workers' output once it is open. It never waits for a reader."""

    def __init__(
        self,
        clock: Clock,
        *,
        is_quiet: bool,
        address: str,
        event_log: str = "",
        print_early: Callable[[str], None] = async_writer.write_message,
    ) -> None:
        """
        Args:
            clock: tells the time.
            is_quiet: another agent on this terminal prints what concerns the whole job.
            address: ``HOST:PORT`` by which other nodes join.
            event_log: path of an event log that another process writes; empty: none.
            print_early: prints a line before the workers' output is open; must not block.
        """
        self._clock = clock
        self._is_quiet = is_quiet
        self._address = address
        self._output: WorkerOutput | None = None
        self._print_early = print_early
        self._event_tail = EventTail(Path(event_log)) if event_log else None
        self._next_look = clock.monotonic()
        self._began_at = clock.monotonic()
        self._delayed_line: tuple[float, str] | None = None
        self._has_explained_token = False
        self._standby_reason = ""
        self._last_notice = ""
        self._recent_lines: deque[tuple[float, str]] = deque(maxlen=2 * MAX_NOTICE_LINES)
        self._stop_reason = ""
        """Why the workers of the last generation were stopped."""
        self._restart_count = 0
        self._world_size = 0
        self._log_dir = ""
        self._plan: LaunchPlan | None = None
        self.stdin_rank: int | None = None
        """Rank that reads the standard input of this process."""

    def print_line(self, text: str) -> None:
        """Print a line, also if this agent is quiet."""
        if self._output is not None:
            self._output.print_line(f"pdrun: {text}")
        else:
            self._print_early(text)

    def use_output(self, plan: LaunchPlan, run: str, output: WorkerOutput) -> None:
        """Print through the workers' output from now on; the run has a name."""
        self._plan = plan
        self._output = output
        if plan.spec.output.files:
            folder = Path(plan.cwd, plan.spec.output.log_dir, run)
            here = Path.cwd()
            if folder.is_relative_to(here):
                folder = folder.relative_to(here)
            self._log_dir = str(folder)

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `print_due` has something to do."""
        times = []
        if self._event_tail is not None:
            times.append(self._next_look)
        if self._delayed_line is not None:
            times.append(self._delayed_line[0])
        return min(times, default=None)

    def print_due(self) -> None:
        """Print the delayed line if it is due, and what was added to the event log."""
        now = self._clock.monotonic()
        if self._delayed_line is not None and now >= self._delayed_line[0]:
            self.print_line(self._delayed_line[1])
            self._delayed_line = None
        if self._event_tail is None or now < self._next_look:
            return
        self._next_look = now + EVENT_LOG_SECONDS
        for event in self._event_tail.read_new():
            if event.get("kind") not in _SHOWN_KINDS:
                continue
            if self._is_repeated(str(event.get("text", ""))):
                continue
            keys = ("node", "host", "text", "reason")
            parts = dict.fromkeys(str(event[key]) for key in keys if event.get(key))
            self.print_line(sanitize_line(f"{event['kind']}: {', '.join(parts)}"))

    def announce_waiting(self, message: Waiting) -> None:
        """Print which nodes have joined, which are missing, and how to start those."""
        plan = self._plan
        if self._is_quiet:
            return
        if not self._address:  # the nodes were started by one command: give them time to arrive
            is_simulated = plan is not None and plan.spec.place.simulated is not None
            delay = ANNOUNCE_DELAY_SECONDS if is_simulated else STARTUP_SECONDS
            if message.elapsed < delay:
                return
        count = message.here or len(message.present)
        names = list(message.present)
        if count > len(names):
            names.append("...")
        required = message.expected
        if plan is not None:
            required = plan.spec.resources.required_nodes
        if count >= required:
            left = format_duration(max(0.0, message.timeout - message.elapsed))
            rest = f"; the job starts in {left} unless more nodes join"
        else:
            spent = f"{format_duration(message.elapsed)} of {format_duration(message.timeout)}"
            rest = f", missing: {', '.join(message.missing)}; {spent}"
        joined = f"{count} of {message.expected} nodes have joined ({', '.join(names)})"
        self.print_line(sanitize_line(joined + rest) + self._join_hint())

    def announce_standby(self, reason: str) -> None:
        """Print that this node has no workers in this generation; again if the reason changes."""
        if reason == self._standby_reason:
            return
        self._standby_reason = reason
        node = self._plan.node if self._plan else "this node"
        self.print_line(sanitize_line(f"{node} is on standby: {reason}"))

    def announce_notice(self, text: str) -> None:
        """Print a text that the scheduler sends to all nodes."""
        self._last_notice = text
        for line in text.splitlines()[:MAX_NOTICE_LINES]:
            is_stack_line = line.startswith(" ")  # stacks may contain equal lines
            if (is_stack_line or not self._is_repeated(line)) and not self._is_quiet:
                self.print_line(sanitize_line(line))

    def _is_repeated(self, text: str) -> bool:
        """
        Record a line; return whether it was recorded a moment ago.

        The scheduler's notices are in its event log, too.
        """
        if not text:
            return False
        now = self._clock.monotonic()
        is_known = any(
            known == text and now - at < REPEAT_SECONDS for at, known in self._recent_lines
        )
        self._recent_lines.append((now, text))
        return is_known

    def _join_hint(self) -> str:
        """Return how to start the missing nodes; the first time also where they get the token."""
        if not self._address:
            return ""
        place = self._plan.spec.place if self._plan is not None else None
        hint = f"; start each with: {self._join_command()}"
        is_local = is_loopback(parse_endpoint(self._address, where="scheduler").host)
        is_insecure = place is not None and place.insecure
        if self._has_explained_token or is_local or is_insecure:
            return hint
        self._has_explained_token = True
        token = "of `pdrun token show` here"
        if place is not None and place.token_file:
            token = "of this node's --token-file"
        return f"{hint} (a host that does not share this home directory needs the token {token})"

    def _join_command(self) -> str:
        is_insecure = self._plan is not None and self._plan.spec.place.insecure
        return quote_command("pdrun", "join", *["--insecure"] * is_insecure, self._address)

    def announce_start(self, assign: Assign) -> None:
        """Print how many workers start, the first time and whenever the number has changed."""
        self._standby_reason = ""
        plan = self._plan
        before = self._world_size
        self._world_size = assign.world_size
        if self._is_quiet or plan is None or before == assign.world_size:
            return
        self._warn_unknown_ranks(plan, assign.world_size)
        workers = plural(assign.world_size, "worker")
        nodes = plural(assign.nodes, "node")
        self.print_line(f"{workers} on {nodes}, {plan.backend}{self._logs_text()}")
        if plan.spec.resources.is_elastic and self._address and not before:
            self.print_line(f"further nodes may join with: {self._join_command()}")

    def _warn_unknown_ranks(self, plan: LaunchPlan, world_size: int) -> None:
        """Warn about ranks in options that the job does not have."""
        output = plan.spec.output
        stdin = plan.spec.program.stdin
        lists = {"--show-ranks": output.show_ranks, "--show-stderr": output.show_stderr or "all"}
        lists["--stdin"] = "none" if stdin is None else str(stdin)
        for option, text in lists.items():
            if unknown := RankSet(text).unmatched_parts(range(world_size)):
                known = describe_ranks(world_size)
                self.print_line(f"warning: {option} {text}: there is no rank {unknown}; {known}")

    def announce_stop(self, message: StopWorkers) -> None:
        """Print why the workers are stopped, unless everything has ended after a moment."""
        self._stop_reason = message.reason
        if not self._is_quiet and not message.reason.startswith("stopped by"):
            grace = format_duration(message.grace)
            line = f"{message.reason}; stopping the other workers (grace {grace})"
            due = self._clock.monotonic() + ANNOUNCE_DELAY_SECONDS
            self._delayed_line = (due, sanitize_line(line))

    def announce_restart(self, assign: Assign) -> None:
        """Print why a new generation starts: after a failure, or because nodes joined or left."""
        self._delayed_line = None
        if not self._is_quiet and self._plan is not None:
            text = "restarting"
            if assign.restarts > self._restart_count:
                text = f"restart {assign.restarts} of {self._plan.spec.policy.max_restarts}"
            if self._plan.spec.resources.is_elastic:
                text += f" with {plural(assign.nodes, 'node')}"
            if self._stop_reason:
                text += f": {self._stop_reason}"
            self.print_line(sanitize_line(text))
        self._restart_count = assign.restarts
        self._stop_reason = ""

    def announce_stop_request(
        self,
        name: str,
        grace: float,
        *,
        is_repeated: bool,
        is_running: bool,
        is_departing: bool = False,
    ) -> None:
        """
        Print that a signal stops the job, or this node only.

        Args:
            name: the signal.
            grace: the grace period in seconds.
            is_repeated: it is not the first signal to stop.
            is_running: workers of this node are running.
            is_departing: only this node leaves the job.
        """
        node = self._plan.node if self._plan else "this node"
        if is_departing and is_repeated:
            self.print_line(f"{name} again: killing all workers of {node}")
        elif is_departing:
            rest = ""
            if is_running:
                rest = f", grace {format_duration(grace)}; a second signal kills its workers"
            self.print_line(f"{name}: {node} leaves the job, which continues without it{rest}")
        elif self._is_quiet:
            return
        elif is_repeated:
            self.print_line(f"{name} again: killing all workers")
        elif is_running:
            duration = format_duration(grace)
            self.print_line(
                f"{name}: stopping the job, grace {duration}; a second signal kills the workers"
            )

    def announce_verdict(self, verdict: Verdict) -> None:
        """Print the summary of the job."""
        self._delayed_line = None
        self.print_due()
        self._report_termination(verdict)
        if self._is_quiet:
            return
        for line in self._summarize(verdict, is_already_shown=self._is_already_shown(verdict)):
            self.print_line(line)

    def _report_termination(self, verdict: Verdict) -> None:
        """Write the first cause where Kubernetes reads why a container has failed."""
        if verdict.code == EXIT_OK or not termination_log_path(os.environ):
            return
        if fault := write_termination_log(self._summarize(verdict, is_already_shown=False)):
            self.print_line(fault)

    def _summarize(self, verdict: Verdict, *, is_already_shown: bool) -> list[str]:
        return format_summary(
            verdict,
            seconds=self._clock.monotonic() - self._began_at,
            log_dir=self._log_dir,
            python=self._worker_python(verdict),
            is_already_shown=is_already_shown,
            stdin_rank=self.stdin_rank,
        )

    def _local_plan(self, failure: Failure | None) -> LaunchPlan | None:
        """Return the plan if the failure was on this machine: on this node or a simulated one."""
        plan = self._plan
        if plan and failure and (plan.node == failure.node or plan.spec.place.simulated):
            return plan
        return None

    def _worker_python(self, verdict: Verdict) -> str:
        plan = self._local_plan(verdict.first)
        if plan and plan.workers and plan.spec.program.kind != "command":
            return plan.workers[0].argv[0]
        return ""

    def _is_already_shown(self, verdict: Verdict) -> bool:
        """
        Return whether the evidence of the first cause has been printed.

        It has if the stacks of a hang were in the last notice, or if `--show-ranks` hid the rank:
        then its last lines were printed when it failed.
        """
        first = verdict.first
        if first is None:
            return False
        if first.cause.kind == "hang":
            return bool(first.cause.traceback) and first.cause.traceback in self._last_notice
        plan = self._local_plan(first)
        if plan is None:
            return False
        output = plan.spec.output
        return first.rank not in RankSet(output.show_stderr or output.show_ranks)

    def announce_exit(self, code: int) -> None:
        """Print the exit code of a node that ends without a verdict; the reason was printed."""
        if not self._is_quiet:
            self.print_line(f"exit code {code}{self._logs_text()}")

    def _logs_text(self) -> str:
        return f", logs in {self._log_dir}" if self._log_dir else ""
