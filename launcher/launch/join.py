"""Joins a job whose scheduler is known. The scheduler sends the job's specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdrun import process_setup
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.config.spec import JobSpec, Policy, Sources, list_field_paths
from pdrun.launcher.launch.agent_options import AgentOptions, console_of
from pdrun.launcher.launch.file_limits import count_open_files
from pdrun.launcher.launch.node_agent import find_job_secret, make_zmq_link, run_node_agent
from pdrun.launcher.plan.model import LaunchPlan

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.messages import Welcome

ASSUMED_NODES = 1000
"""Size of a job that is not known yet: it sets the time-outs of connecting."""


def execute_join(endpoint: Endpoint, overrides: Mapping[str, Any], sources: Sources) -> int:
    """
    Join the job whose scheduler listens on ``endpoint``; return its exit code.

    Args:
        endpoint: the scheduler's address.
        overrides: field path -> value, as given on this node. The scheduler sends the other values.
        sources: field path -> source of the override.

    Raises:
        PdrunError: no scheduler answers, the token differs, or the plan cannot be made.
    """
    from pdrun.launcher.plan.facts import gather_facts
    from pdrun.launcher.plan.plan import make_plan
    from pdrun.rendezvous.transport.listen import use_port_range

    def plan_from_welcome(welcome: Welcome) -> LaunchPlan:
        spec = merge_spec(welcome.spec, overrides, endpoint)
        job_sources = dict.fromkeys(list_field_paths(), f"the job at {endpoint}")
        all_sources = {**job_sources, **sources, "place.scheduler": "join"}
        use_port_range(spec.place.port_range)
        plan = make_plan(spec, gather_facts(spec), all_sources)
        process_setup.require_descriptors(*count_open_files(plan))
        return plan

    secret = find_job_secret(
        AgentOptions(),
        overrides.get("place.token_file", ""),
        sources.get("place.token_file", ""),
        overrides.get("place.insecure", False),
    )
    with console_of(AgentOptions()) as options:
        link = make_zmq_link(
            endpoint,
            secret,
            job="",
            start_timeout=overrides.get("policy.start_timeout", Policy().start_timeout),
            needs_spec=True,
            expected_nodes=ASSUMED_NODES,
            print_line=options.print_line,
        )
        return run_node_agent(plan_from_welcome, link, options, secret=secret)


def merge_spec(text: str, overrides: Mapping[str, Any], endpoint: Endpoint) -> JobSpec:
    """
    Return the job's specification with this node's overrides.

    Raises:
        ConfigError: the scheduler has no specification yet, or one of another version.
    """
    if not text:
        raise ConfigError(
            "the scheduler has no specification of the job yet",
            where=str(endpoint),
            hint="start one node with the complete command first",
        )
    try:
        spec = JobSpec.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the job's specification is not supported: {error}", where=str(endpoint)
        ) from error
    groups: dict[str, dict[str, Any]] = {"place": {"scheduler": endpoint, "serve": False}}
    values: dict[str, Any] = {"env": dict(spec.env)}
    for path, value in overrides.items():
        group, _, name = path.partition(".")
        if not name:
            values[path] = value
        elif group == "env":
            values["env"][name] = value
        else:
            groups.setdefault(group, {})[name] = value
    for group, changes in groups.items():
        values[group] = replace(getattr(spec, group), **changes)
    return replace(spec, **values)
