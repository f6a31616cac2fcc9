"""How many open files a plan needs on this node, and the error for a limit that is too low."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdrun import process_setup
from pdrun.launcher.plan.model import LaunchPlan

MIN_FILES = 32
FILES_OF_SINGLE_AGENT = 16
FILES_OF_AGENT = 32
"""In addition: those of its workers, and one per node if it runs the scheduler."""
FILES_OF_CONTROLLER = 16
FILES_PER_AGENT = 3
"""Of a controller, for each agent: two pipes and the lifeline."""


@contextmanager
def check_file_limit(plan: LaunchPlan) -> Iterator[None]:
    """
    Check the limit of open files before anything is started.

    An error in the body that some other limit caused is replaced by one that names the limit.

    Raises:
        PdrunError: the limit is too low.
    """
    count, what = count_open_files(plan)
    process_setup.require_descriptors(count, what)
    try:
        yield
    except Exception as error:
        if limit := process_setup.resource_limit_error(error, what, 2 * count):
            raise limit from error
        raise


def count_open_files(plan: LaunchPlan) -> tuple[int, str]:
    """Return how many descriptors the busiest process of a plan needs on this node, and why."""
    workers = len(plan.workers)
    if not workers:
        devices = plan.spec.resources.devices
        workers = devices if isinstance(devices, int) else 1
    nodes = plan.spec.resources.max_members
    agent = FILES_OF_SINGLE_AGENT if plan.mode == "single" else FILES_OF_AGENT + nodes
    controller = 0
    if plan.mode in ("local", "hosts", "external"):
        controller = FILES_OF_CONTROLLER + FILES_PER_AGENT * nodes
    count = max(agent + _files_per_worker(plan) * workers, MIN_FILES, controller)
    return count, f"a node with {workers} worker{'s' if workers > 1 else ''}"


def _files_per_worker(plan: LaunchPlan) -> int:
    """
    Return the descriptors that one worker takes.

    The agent has two pipes and two log files per worker. The supervisor has a worker's whole
    request until the fork server has forked it.
    """
    if plan.spec.program.kind != "command":
        return 6
    return 4 if plan.spec.output.files else 2
