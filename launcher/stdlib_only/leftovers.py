"""
Find and kill what workers leave behind: descendants of one slot, or of all slots.

A worker's descendants move to the supervisor, the nearest sub-reaper, when their parent ends. A
leftover belongs to a slot by its pid, by its session, or by the marker in its environment.

Loaded in three ways, see `supervisor`. Standard library only.
"""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pdrun.launcher.stdlib_only.process_tree import ProcessInfo
    from pdrun.launcher.stdlib_only.worker_exec import WorkerParent

if TYPE_CHECKING or __package__:
    from pdrun.launcher.stdlib_only import process_tree, watchdog
elif "process_tree" not in globals():
    import process_tree
    import watchdog

SETTLE_SECONDS = 0.1
"""
Time in which leftovers may end without being killed. The resource tracker of multiprocessing cleans
up in this time.
"""
MAX_LISTED_PROCESSES = 32
"""Processes that are named in one report."""


class Cleanup:
    """
    A request to kill what a slot (None: every slot) has left.

    ``killed`` maps pids to texts.
    """

    __slots__ = ("give_up_at", "kill_at", "killed", "slot")

    def __init__(self, slot: int | None, now: float) -> None:
        self.slot = slot
        self.kill_at = now + SETTLE_SECONDS
        self.give_up_at = now + process_tree.KILL_SECONDS
        self.killed: dict[int, str] = {}


def step_cleanup(supervisor: WorkerParent, cleanup: Cleanup) -> bool:
    """Advance a cleanup by one step; return whether it is complete and was answered."""
    roots, is_complete = _find_roots(supervisor, cleanup)
    now = time.monotonic()
    if (roots or not is_complete) and now < cleanup.give_up_at:
        leaders = supervisor.children.keys()
        # A worker itself gets no time to settle: the agent wants it killed.
        if now >= cleanup.kill_at or any(root.pid in leaders for root in roots):
            for member in process_tree.descendants(roots):
                if member.state != "Z" and member.pid not in leaders:
                    cleanup.killed.setdefault(member.pid, str(member))
                process_tree.kill_process(member)
        return False
    stuck = [member for member in process_tree.descendants(roots) if member.state != "Z"]
    stuck_pids = {member.pid for member in stuck}
    killed = [text for pid, text in cleanup.killed.items() if pid not in stuck_pids]
    supervisor.send_event(
        ev="swept",
        slot=cleanup.slot,
        processes=_limit_lines(killed),
        stuck=_limit_lines([f"{member} {member.state}" for member in stuck]),
    )
    _forget_pids(supervisor, cleanup.slot)
    return True


def kill_all(supervisor: WorkerParent) -> None:
    """Kill all descendants until no child is left, for at most KILL_SECONDS."""
    give_up_at = time.monotonic() + process_tree.KILL_SECONDS
    poll = select.poll()
    poll.register(supervisor.wake_fd, select.POLLIN)
    while supervisor.own_process is not None and time.monotonic() < give_up_at:
        for member in process_tree.descendants(process_tree.list_children(supervisor.own_process)):
            process_tree.kill_process(member)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        poll.poll(process_tree.RETRY_SECONDS * 1000)


def _find_roots(supervisor: WorkerParent, cleanup: Cleanup) -> tuple[list[ProcessInfo], bool]:
    """
    Return the supervisor's children that belong to the cleanup's slot, and whether these are all.

    They may not be all if a child with an unknown slot is exiting: its own children, which may
    belong to the slot, become children of the supervisor only when it has ended.
    """
    if supervisor.own_process is None:
        return [], True
    roots = [
        child
        for child in process_tree.list_children(supervisor.own_process)
        if child.pid != supervisor.watchdog_pid
    ]
    if cleanup.slot is None:
        return roots, True
    slots: set[int | None] = {cleanup.slot}
    if not any(child.slot >= 0 and child.slot != cleanup.slot for child in supervisor.processes()):
        slots.add(None)  # leftovers without a known slot go with the last worker
    found = []
    is_complete = True
    for root in roots:
        slot = _find_slot(supervisor, root)
        if slot in slots:
            found.append(root)
        elif slot is None:
            now = process_tree.find_process(root.pid)
            is_complete = is_complete and now is not None and not now.is_exiting
    return found, is_complete


def _find_slot(supervisor: WorkerParent, root: ProcessInfo) -> int | None:
    """Return the slot of a direct child: by pid, by session, or by the marker; None: unknown."""
    slot = supervisor.slot_by_pid.get(root.pid, supervisor.slot_by_pid.get(root.session))
    if slot is not None:
        return slot
    try:
        environment = process_tree.read_file(f"/proc/{root.pid}/environ")
    except OSError:
        return None
    prefix = f"{watchdog.MARKER_VARIABLE}={supervisor.token}.".encode()
    found = environment.partition(prefix)[2].partition(b"\0")[0]
    if not found.lstrip(b"-").isdigit():
        return None
    return int(found)


def _forget_pids(supervisor: WorkerParent, slot: int | None) -> None:
    """Forget the pids of ended workers: no leftover of theirs is there, so pids may be reused."""
    ended = [
        pid
        for pid, owner in supervisor.slot_by_pid.items()
        if slot in (None, owner) and pid not in supervisor.children
    ]
    for pid in ended:
        del supervisor.slot_by_pid[pid]


def _limit_lines(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LISTED_PROCESSES:
        return lines
    rest = len(lines) - MAX_LISTED_PROCESSES
    return [*lines[:MAX_LISTED_PROCESSES], f"... and {rest} more"]
