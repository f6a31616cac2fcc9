"""
How a job of several agents ends: when to stop the agents that remain, and the job's exit code.

Pure: times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdrun.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE
from pdrun.launcher.hosts.nodelist import compress_names

MIN_COMPRESSED_NAMES = 4
AFTER_EXIT_SECONDS = 5.0
"""How long others may stay after an agent has exited: a verdict reaches all at the same time."""
AFTER_KILL_SECONDS = 15.0
"""
How long others may stay after an agent was killed, in addition to the grace time: the scheduler
must notice it first.
"""
AFTER_CLOSE_SECONDS = 5.0
"""How long agents may stay after their lifeline was closed."""
AFTER_EARLY_EXIT_SECONDS = 1.0
"""
How long others may stay after an agent has exited before there were workers, and then again after
their lifelines were closed.
"""


class ShutdownTimer:
    """
    When to do what about the agents that remain after the first one has ended.

    The steps are ``term`` (send SIGTERM), ``close`` (close the lifelines) and ``kill``.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._steps: list[tuple[float, str]] = []

    def on_agent_exit(self, now: float, *, is_killed: bool, has_workers: bool = True) -> None:
        """
        Set the times, if this is the first agent that has ended.

        Args:
            now: the current time.
            is_killed: a signal killed the agent.
            has_workers: workers may have started.
        """
        if self._steps:
            return
        if has_workers:
            wait = AFTER_KILL_SECONDS + self._grace if is_killed else AFTER_EXIT_SECONDS
            term = now + wait
            close = term + self._grace + AFTER_CLOSE_SECONDS
            kill = close + AFTER_CLOSE_SECONDS
            self._steps = [(term, "term"), (close, "close"), (kill, "kill")]
        else:
            close = now if is_killed else now + AFTER_EARLY_EXIT_SECONDS
            self._steps = [(close, "close"), (close + AFTER_EARLY_EXIT_SECONDS, "kill")]

    def stop_now(self, now: float) -> None:
        """Close the lifelines now: the user has sent a third stop signal."""
        self._steps = [(now, "close"), (now + AFTER_CLOSE_SECONDS, "kill")]

    def next_step(self, now: float) -> str:
        """Return a step that is due, once; empty: none."""
        if self._steps and now >= self._steps[0][0]:
            return self._steps.pop(0)[1]
        return ""


def job_exit_code(
    exits: Sequence[tuple[str, int | None]],
    *,
    stopped_nodes: Sequence[str] = (),
    stop_signals: Sequence[int] = (),
    head_node: str = "",
) -> tuple[int, str]:
    """
    Return the exit code of a job, and a message if the agents disagree about it.

    Args:
        exits: (node, code as Popen returns it, None if the connection was lost), in the order in
            which they ended.
        stopped_nodes: nodes whose agents ended because this process stopped them; their codes are
            no verdict.
        stop_signals: signals by which the user stopped the job before all agents had ended.
        head_node: node whose code is the job's, because others may leave earlier; empty: none.
    """
    if head_node and head_node not in stopped_nodes:
        for node, code in exits:
            if node == head_node and code is not None and code >= 0:
                return code, ""
    unstopped = [(node, code) for node, code in exits if node not in stopped_nodes]
    verdicts = [(node, code) for node, code in unstopped if code is not None and code >= 0]
    if stop_signals:
        signal_codes = [128 + number for number in stop_signals]
        for _, code in verdicts:
            if code in signal_codes:
                return code, ""
        if not verdicts:
            return signal_codes[0], ""
    if not verdicts:
        return _exit_code_without_verdict(unstopped), ""
    code = next((code for _, code in verdicts if code), 0)
    if len({code for _, code in verdicts}) == 1:
        return code, ""
    nodes_by_code: dict[int, list[str]] = {}
    for node, one in verdicts:
        nodes_by_code.setdefault(one, []).append(node)
    listed = ", ".join(f"{format_nodes(nodes)}: {one}" for one, nodes in nodes_by_code.items())
    return (
        code,
        f"the nodes ended with different codes ({listed}); using the first that is not 0: {code}",
    )


def format_nodes(names: Sequence[str]) -> str:
    """Return a list of nodes for a message; a long one with ranges."""
    if len(names) < MIN_COMPRESSED_NAMES:
        return ", ".join(names)
    return compress_names(list(names))


def _exit_code_without_verdict(exits: Sequence[tuple[str, int | None]]) -> int:
    """Return the exit code if every agent was killed, lost or stopped by this process."""
    if not exits:
        return EXIT_SOFTWARE
    for _, code in exits:
        if code is not None:
            return 128 - code
    return EXIT_UNAVAILABLE
