"""``pdrun env``: what it shows of a launcher, as text and as JSON."""

from __future__ import annotations

import json

from pdrun.launcher.cli.env import report_environment
from tests.launcher.adapters.golden import HERE, environ_of, load_case, probes


def shown(name: str, **more: str) -> str:
    """Return the report's part about the launcher and what follows, for a case."""
    case = load_case(HERE / "cases" / f"{name}.yaml")
    return report_environment({**environ_of(case), **more}, probes(case)).partition(
        "\nlauncher:\n"
    )[2]


def test_what_is_found_has_its_variable_and_what_is_ignored_its_reason() -> None:
    text = shown("srun-requeued")
    assert (
        text.splitlines()[0]
        == "  srun (a step of Slurm) [slurm-step]: this process is one of its tasks"
    )
    assert "    node rank  1   by SLURM_NODEID" in text
    assert "    hosts      n[1-2]   by SLURM_STEP_NODELIST" in text
    assert "    limit      24h   by SLURM_JOB_END_TIME, SLURM_JOB_START_TIME" in text
    assert "    ends at    2023-11-15 22:13:20 UTC   by SLURM_JOB_END_TIME" in text
    assert "    attempt    2   by SLURM_RESTART_COUNT" in text
    assert "  ignored: slurm-job: outer: srun (a step of Slurm) takes precedence" in text


def test_an_environment_that_contradicts_itself_is_a_line_and_not_an_end() -> None:
    assert shown("srun-tasks-differ").splitlines() == [
        "  error: SLURM_STEP_TASKS_PER_NODE: '1,2' has 3 tasks, but the step has 2"
    ]


def test_the_chosen_launcher_is_shown() -> None:
    assert "--launcher none" in shown("sbatch-body", PDRUN_LAUNCHER="none")
    assert shown("nothing").startswith("  no launcher\n")


def test_the_same_as_json() -> None:
    case = load_case(HERE / "cases" / "openmpi-in-salloc.yaml")
    data = json.loads(report_environment(environ_of(case), probes(case), as_json=True))
    found = data["launcher"]
    assert (found["launcher"], found["kind"], found["rank"], found["world"]) == (
        "openmpi",
        "task",
        1,
        2,
    )
    assert found["hosts"] == [{"name": "n1", "slots": 2}, {"name": "n2", "slots": 2}]
    assert found["sources"]["rank"] == "OMPI_COMM_WORLD_RANK"
    assert [item["launcher"] for item in found["ignored"]] == ["slurm-step", "slurm-job"]
    assert found["error"] == ""
    assert data["environment"]["Slurm"]["SLURM_JOB_ID"] == "7"
