"""One run of a job: its name, its scheduler configuration, its event log, its registry record."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun.clock import SystemClock
from pdrun.errors import ConfigError
from pdrun.launcher.config.spec import Policy, Resources
from pdrun.launcher.jobs import registry
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.text import make_name

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.events import SchedulerConfig

MAX_SETTING_CHARACTERS = 200
INSECURE_WARNING = (
    "INSECURE: no token is required; any process that reaches the scheduler's port can join the job"
)


def make_run_name(plan: LaunchPlan) -> str:
    """Return a unique name for a run: ``train-20250131-174502-9f3c``."""
    stem = plan.spec.job or make_name(
        Path(plan.spec.program.target.rstrip("/")).name.removesuffix(".py")
    )
    return f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def make_scheduler_config(plan: LaunchPlan, run: str) -> SchedulerConfig:
    """Return the configuration of the scheduler of this plan's job."""
    from pdrun.rendezvous.protocol.events import ChosenSetting

    host = plan.compared.get("host", plan.node)
    config = make_membership_config(
        plan.spec.resources, plan.spec.policy, job=plan.job, run=run, host=host
    )
    place = plan.spec.place
    return replace(
        config,
        hosts=place.node_names or tuple(listed.name for listed in place.hosts),
        spec=plan.spec.to_shared_json(),
        command=plan.compared.get("command", ""),
        settings=tuple(ChosenSetting(*row) for row in list_chosen_settings(plan)),
    )


def list_chosen_settings(plan: LaunchPlan) -> Iterator[tuple[str, str, str]]:
    """
    Yield path, value and source of each setting that is not the default, for the record of a run.

    Arguments of the program and values of ``--env`` may be secrets: only their names are kept.
    """
    for path, source in sorted(plan.sources.items()):
        group, _, name = path.rpartition(".")
        owner = getattr(plan.spec, group, None) if group else plan.spec
        value = getattr(owner, name, None)
        if source == "default" or path == "program.args" or value in (None, ""):
            continue
        if path == "env":
            value = " ".join(value)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield path, text[:MAX_SETTING_CHARACTERS], source[:MAX_SETTING_CHARACTERS]


def make_membership_config(
    resources: Resources, policy: Policy, *, job: str, run: str, host: str
) -> SchedulerConfig:
    """Return how a scheduler forms, restarts and ends a job."""
    from pdrun.rendezvous.protocol.events import SchedulerConfig

    return SchedulerConfig(
        job=job,
        run=run,
        host=host,
        nodes=resources.nodes,
        min_nodes=resources.min_nodes,
        spares=resources.spares,
        start_timeout=policy.start_timeout,
        grace=policy.grace,
        max_restarts=policy.max_restarts,
        restart_window=policy.restart_window,
        restart_on=policy.restart_on,
        no_restart_on=policy.no_restart_on,
        backoff=policy.backoff,
        gather=policy.gather,
        grow=policy.grow,
        patience=policy.scheduler_loss,
        time_limit=policy.time_limit,
    )


def event_log_path(plan: LaunchPlan, run: str) -> Path | None:
    """Return the path of the event log; None if the user wants no files."""
    if plan.spec.output.files:
        return Path(plan.cwd, plan.spec.output.log_dir, run, "events.jsonl")
    return None


def register_run(
    plan: LaunchPlan, run: str, scheduler: str, *, controller_pid: int | None = None
) -> None:
    """
    Add the run to this user's registry; a failure is ignored.

    Args:
        plan: the plan of the first node.
        run: the name of the run.
        scheduler: ``HOST:PORT``; empty: no scheduler listens.
        controller_pid: the process that `pdrun stop` signals; None: this one.
    """
    events = event_log_path(plan, run)
    registry.register_job(
        registry.make_job_record(
            run,
            plan.job,
            events=str(events or ""),
            log_dir=str(Path(plan.cwd, plan.spec.output.log_dir)),
            made=SystemClock().wall(),
            pid=controller_pid,
            scheduler=scheduler,
            log_name=plan.spec.output.log_name,
        )
    )


@contextmanager
def with_source(source: str) -> Iterator[None]:
    """Make an error about ``--token-file`` name the source that the file name came from."""
    try:
        yield
    except ConfigError as error:
        if source:
            error.where = re.sub("^--token-file(?= |$)", lambda _: source, error.where)
        raise
