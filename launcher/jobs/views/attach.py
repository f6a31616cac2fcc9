"""``pdrun attach``: the output of a running job from now on, or the stacks of its workers here."""

from __future__ import annotations

import os
import time

from pdrun.errors import EXIT_OK, UsageError
from pdrun.launcher.common import rank_lists
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.launcher.jobs.logs import print_logs
from pdrun.launcher.jobs.lookup import print_note
from pdrun.launcher.jobs.views.local_workers import find_workers
from pdrun.launcher.jobs.views.trace import choose_running
from pdrun.text import escape_text, plural

INTERRUPTED = 130


def split_target(text: str | None) -> tuple[str | None, str]:
    """
    Return job and ranks of ``JOB``, ``JOB:3``, ``JOB:0,7-9`` or ``:3``.

    Raises:
        UsageError: the ranks are malformed.
    """
    job, colon, ranks = (text or "").rpartition(":")
    if not colon:
        return text, "all"
    return job or None, rank_lists.parse_ranks(ranks, "the ranks of JOB:RANKS")


def follow_output(target: str | None, lines: int) -> int:
    """
    Show the output of a running job until it ends; Ctrl-C leaves it running.

    Raises:
        UsageError: no such job runs, or its logs are not on this machine.
    """
    name, ranks = split_target(target)
    job = choose_running(name)
    code = print_logs(job.run, ranks=ranks, follow=True, lines=lines)
    if code == INTERRUPTED:
        print_note(f"detached; the job continues: pdrun attach {job.run}, pdrun stop {job.run}")
        return EXIT_OK
    return code


def print_stacks(target: str | None) -> int:
    """
    Print the stacks of the workers of a running job on this host; equal ones once.

    Raises:
        UsageError: no such job runs, or none of its workers here.
    """
    name, ranks = split_target(target)
    job = choose_running(name)
    wanted = rank_lists.RankSet(ranks)
    workers = [worker for worker in find_workers(job.run) if worker.rank in wanted]
    if not workers:
        what = f"no worker of {job.run} with these ranks runs on this host"
        raise UsageError(what, hint="call it on the host of the rank; pdrun status shows it")
    for folder in sorted({worker.folder for worker in workers}):
        own = [worker for worker in workers if worker.folder == folder]
        pids = [worker.pid for worker in own]
        request = StackRequest(
            [(worker.rank, slot, worker.pid) for slot, worker in enumerate(own)],
            folder,
            lambda slot, number, pids=pids: os.kill(pids[slot], number),  # type: ignore[misc]
            time.monotonic(),
        )
        try:
            while not request.poll_workers(time.monotonic()):
                time.sleep(max(0.0, request.deadline - time.monotonic()))
            for group in request.grouped_stacks():
                shown = ", ".join(map(str, group.ranks))
                print(f"{plural(len(group.ranks), 'rank')} ({shown}):")
                print("\n".join(f"  {escape_text(line)}" for line in group.stack.splitlines()))
        finally:
            request.close()
    return EXIT_OK
