"""What the record of a run has about its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdrun.launcher.jobs.run_record import MAX_SETTING_CHARACTERS, list_chosen_settings


def plan_of(sources: dict[str, str], **groups: Any) -> Any:
    spec = SimpleNamespace(**groups)
    return SimpleNamespace(sources=sources, spec=spec)


def test_chosen_values_have_their_sources_and_secrets_only_their_names() -> None:
    plan = plan_of(
        {
            "resources.nodes": "--nodes",
            "resources.devices": "default",
            "program.args": "command line",
            "env": "--env",
            "place.local": "job.yaml:3",
            "place.hosts": "--hosts",
            "job": "--job",
        },
        resources=SimpleNamespace(nodes=2, devices="auto"),
        program=SimpleNamespace(args=("--token", "hunter2")),
        env={"API_KEY": "hunter2", "LR": "1"},
        place=SimpleNamespace(local=True, hosts=("a" * 300, "b")),
        job="train",
    )
    rows = {path: (value, source) for path, value, source in list_chosen_settings(plan)}
    assert rows["resources.nodes"] == ("2", "--nodes")
    assert rows["place.local"] == ("yes", "job.yaml:3")
    assert rows["env"] == ("API_KEY LR", "--env")
    assert rows["job"] == ("train", "--job")
    assert len(rows["place.hosts"][0]) == MAX_SETTING_CHARACTERS
    assert set(rows) == {"resources.nodes", "place.local", "place.hosts", "env", "job"}
    assert "hunter2" not in str(rows)
