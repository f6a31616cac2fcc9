"""``pdrun attach``: output of a running job from now on, stacks, a rank in `pdrun.breakpoint`."""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from pdrun import process_setup
from pdrun.errors import EXIT_OK, UsageError
from pdrun.launcher.common import rank_lists
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.launcher.jobs.logs import print_logs
from pdrun.launcher.jobs.lookup import print_note
from pdrun.launcher.jobs.views.local_workers import find_workers
from pdrun.launcher.jobs.views.trace import choose_running
from pdrun.launcher.output.formatting import escape_controls
from pdrun.text import escape_text, plural, quote_command

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
        again, stop = (quote_command("pdrun", word, job.run) for word in ("attach", "stop"))
        print_note(f"detached; the job continues: {again}, {stop}")
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


def debug_rank(target: str | None) -> int:
    """
    Connect the terminal to a rank that waits in `pdrun.breakpoint`.

    It ends when the rank goes on, or at the end of the input, after which one can connect again.

    Raises:
        UsageError: no such job runs, or no rank waits on this host.
    """
    name, ranks = split_target(target)
    job = choose_running(name)
    wanted = rank_lists.RankSet(ranks)
    waiting = [
        worker
        for worker in find_workers(job.run)
        if worker.rank in wanted and (worker.folder / f"debug-{worker.rank}").exists()
    ]
    if not waiting:
        what = f"no rank of {job.run} waits in pdrun.breakpoint on this host"
        raise UsageError(what, hint="call it on the host of the rank; its output has the line")
    worker = waiting[0]
    process_setup.restore_sigint()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            link.connect(str(worker.folder / f"debug-{worker.rank}"))
            _relay_lines(link)
        except KeyboardInterrupt:
            pass
        except OSError as error:
            what = f"rank {worker.rank} cannot be reached: {error.strerror}"
            raise UsageError(what, where=job.run) from None
    print_note(f"detached from rank {worker.rank}")
    return EXIT_OK


def _relay_lines(link: socket.socket) -> None:
    """Pass lines in both directions until one side closes."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(sys.stdin, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if link.fileno() in ready:
            data = link.recv(1 << 16)
            if not data:
                return
            os.write(1, escape_controls(data))
        if sys.stdin.fileno() in ready:
            line = os.read(sys.stdin.fileno(), 1 << 16)
            if line:
                link.sendall(line)
            else:
                poll.unregister(sys.stdin)
                link.shutdown(socket.SHUT_WR)
