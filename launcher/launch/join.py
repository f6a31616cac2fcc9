"""Joins a job whose scheduler is known: the job's specification comes from the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdrun import process_setup
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.config.spec import JobSpec, Policy, Sources, field_paths
from pdrun.launcher.launch.agent_options import Seat, at_a_console
from pdrun.launcher.launch.file_limits import files_needed
from pdrun.launcher.launch.node_agent import agent, secret_of, zmq_link
from pdrun.launcher.plan.model import LaunchPlan

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.messages import Welcome

UNKNOWN = 1000
"""
Nodes that a job is taken to have by one that joins it and has not been told: sets how patiently it
connects.
"""


def execute_join(endpoint: Endpoint, overrides: Mapping[str, Any], sources: Sources) -> int:
    """
    Take part in the job whose scheduler is at ``endpoint``; return its exit code.

    Args:
        overrides: field path -> value, of what was said on this node; the rest is the job's
            specification, which the
            scheduler hands out.
        sources: field path -> where the override came from.

    Raises:
        PdrunError: nobody answered, the token differs, or the plan cannot be made.
    """
    from pdrun.launcher.plan.facts import gather
    from pdrun.launcher.plan.plan import plan

    def planned(welcome: Welcome) -> LaunchPlan:
        spec = joined_spec(welcome.spec, overrides, endpoint)
        told = dict.fromkeys(field_paths(), f"the job at {endpoint}")
        made = plan(spec, gather(spec), {**told, **sources, "place.scheduler": "join"})
        process_setup.require_descriptors(*files_needed(made))
        return made

    named = overrides.get("place.token_file", ""), sources.get("place.token_file", "")
    secret = secret_of(Seat(), *named, overrides.get("place.insecure", False))
    timeout = overrides.get("policy.start_timeout", Policy().start_timeout)
    with at_a_console(Seat()) as seat:
        link = zmq_link(endpoint, secret, "", timeout, needs_spec=True, crowd=UNKNOWN, say=seat.say)
        return agent(planned, link, seat)


def joined_spec(text: str, overrides: Mapping[str, Any], endpoint: Endpoint) -> JobSpec:
    """
    Return the job's specification with what was said on this node laid over it.

    Raises:
        ConfigError: the scheduler has none yet, or it is of another version.
    """
    if not text:
        raise ConfigError(
            "the scheduler does not know yet what the job runs",
            where=str(endpoint),
            hint="start one node with the whole command first",
        )
    try:
        spec = JobSpec.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the job's specification is not understood: {error}", where=str(endpoint)
        ) from error
    groups: dict[str, dict[str, Any]] = {"place": {"scheduler": endpoint, "serve": False}}
    single: dict[str, Any] = {"env": dict(spec.env)}
    for path, value in overrides.items():
        group, _, name = path.partition(".")
        if not name:
            single[path] = value
        elif group == "env":
            single["env"][name] = value
        else:
            groups.setdefault(group, {})[name] = value
    return replace(
        spec,
        **single,
        **{group: replace(getattr(spec, group), **said) for group, said in groups.items()},
    )
