"""How many open files a plan needs on this node, and the error for a limit that is too low."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdrun import process_setup
from pdrun.launcher.plan.model import LaunchPlan


@contextmanager
def enough_files(plan: LaunchPlan) -> Iterator[None]:
    """
    Complain of too low a limit of open files before anything is started, and of any limit that is
    met after all.
    """
    count, what = files_needed(plan)
    process_setup.require_descriptors(count, what)
    try:
        yield
    except Exception as error:
        if limit := process_setup.resource_limit_error(error, what, 2 * count):
            raise limit from error
        raise


def files_needed(plan: LaunchPlan) -> tuple[int, str]:
    """
    Return how many descriptors the busiest process of a plan needs on this node, and for what.
    """
    asked = plan.spec.resources.devices
    workers = len(plan.workers) or (asked if isinstance(asked, int) else 1)
    # the agent holds two pipes and two log files a worker; the keeper, until a starter has forked
    # it, its whole order
    most = (
        6 if plan.spec.program.kind != "command" else 4 if plan.spec.output.files else 2
    ) * workers
    nodes = plan.spec.resources.members
    own = 16 if plan.mode == "alone" else 32 + nodes
    front = 16 + 3 * nodes if plan.mode in ("local", "hosts", "through") else 0
    return max(own + most, 32, front), f"a node with {workers} worker{'s' if workers > 1 else ''}"
