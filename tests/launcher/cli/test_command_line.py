"""The layer around the commands: help, defaults, exit codes, faults of our own."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun import put_standard_library_first
from pdrun.launcher.cli import main as cli
from pdrun.launcher.launch import execute, join
from pdrun.launcher.plan.model import LaunchPlan
from tests.launcher.cli.conftest import Outcome

Call = Callable[..., Outcome]


def test_the_first_screen_fits_one(pdrun: Call) -> None:
    for argv in (["--help"], ["-h"]):
        outcome = pdrun(*argv)
        lines = outcome.out.splitlines()
        assert outcome.code == 0
        assert len(lines) <= 30
        assert max(map(len, lines)) <= 82
        assert sum(line.startswith("  pdrun ") for line in lines) == 3


def test_no_words_at_all_show_the_first_screen_as_a_mistake(pdrun: Call) -> None:
    outcome = pdrun()
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("Usage: pdrun")


def test_the_whole_help_names_every_option(pdrun: Call) -> None:
    text = pdrun("run", "--help").out
    for word in (
        "--nodes N",
        "--nproc-per-node N",
        "--worker_num N",
        "PDRUN_NODES",
        "Failures and time limits:",
    ):
        assert word in text


@pytest.mark.parametrize(
    "name", ["join", "scheduler", "status", "logs", "stop", "token", "env", "completion"]
)
def test_every_command_has_help(pdrun: Call, name: str) -> None:
    outcome = pdrun(name, "--help")
    assert outcome.code == 0
    assert f"Usage: pdrun {name}" in outcome.out


def test_version(pdrun: Call) -> None:
    assert pdrun("--version").out.startswith("pdrun 0.")


@pytest.fixture
def plans(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans that would have been executed."""
    caught: list[LaunchPlan] = []

    def record_plan(plan: LaunchPlan) -> int:
        caught.append(plan)
        return 42

    monkeypatch.setattr(execute, "execute", record_plan)
    return caught


def test_run_is_the_default_and_its_code_is_the_exit_code(
    pdrun: Call, plans: list[LaunchPlan]
) -> None:
    assert pdrun("--devices", "2", "train.py", "--lr", "3").code == 42
    assert pdrun("run", "--devices", "2", "train.py", "--lr", "3").code == 42
    assert plans[0] == plans[1]
    assert plans[0].workers[0].argv[1:] == ("train.py", "--lr", "3")


def test_a_script_that_is_called_like_a_command(
    pdrun: Call, folder: Path, plans: list[LaunchPlan]
) -> None:
    (folder / "status").write_text("")
    assert pdrun("run", "status", "-h").code == 42
    assert plans[0].spec.program.args == ("-h",)


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--nodes", "9", "--help", "-m", "--dry-run"],
        ["--", "train.py", "--nodes", "9", "--help", "-m", "--dry-run"],
    ],
)
def test_arguments_behind_the_script_belong_to_the_script(
    pdrun: Call, plans: list[LaunchPlan], argv: list[str]
) -> None:
    assert pdrun(*argv).code == 42
    assert plans[0].spec.program.args == ("--nodes", "9", "--help", "-m", "--dry-run")


def test_a_double_dash_behind_the_script_stays(pdrun: Call, plans: list[LaunchPlan]) -> None:
    pdrun("train.py", "--", "-x")
    pdrun("-m", "json.tool", "--", "-x")
    assert [plan.spec.program.args for plan in plans] == [("--", "-x")] * 2


def test_a_script_whose_name_begins_with_a_dash(
    pdrun: Call, folder: Path, plans: list[LaunchPlan]
) -> None:
    (folder / "-c").write_text("")
    assert pdrun("--", "-c", "x").code == 42
    assert plans[0].workers[0].argv[1:] == ("./-c", "x")


def test_a_dry_run_as_json_holds_the_plan(pdrun: Call) -> None:
    words = "--dry-run --json --nodes 2 --devices 1 --local --env API_KEY=abc train.py"
    outcome = pdrun(*words.split())
    data = json.loads(outcome.out)
    assert (data["mode"], data["nodes"], len(data["simulated"])) == ("local", 2, 2)
    assert data["simulated"][1]["workers"][0]["argv"][1:] == ["train.py"]
    assert data["sources"]["resources.nodes"] == "--nodes"
    assert "abc" not in outcome.out


def test_explain_goes_to_stderr_when_the_job_follows(pdrun: Call, plans: list[LaunchPlan]) -> None:
    outcome = pdrun("--explain", "train.py")
    assert outcome.code == 42
    assert outcome.out == ""
    assert "resources.nodes" in outcome.err
    assert "backend cuda" in outcome.err


def test_explain_names_overridden_and_unknown_variables(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDRUN_NODES", "7")
    monkeypatch.setenv("PDRUN_DEVICE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    text = pdrun("--dry-run", "--explain", "--nodes", "1", "train.py").out
    assert "PDRUN_NODES=7 is overridden by --nodes 1" in text
    assert "PDRUN_DEVICE: unknown variable; did you mean 'PDRUN_DEVICES'?" in text
    assert "PMI_RANK is removed from the workers' environment" in text


def test_a_mistyped_variable_is_a_warning_on_every_run(
    pdrun: Call, plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pdrun("train.py").err == ""
    monkeypatch.setenv("PDRUN_DEVICE", "2")
    warning = "pdrun: warning: PDRUN_DEVICE: unknown variable; did you mean 'PDRUN_DEVICES'?\n"
    outcome = pdrun("train.py")
    assert (outcome.code, outcome.err) == (42, warning)
    monkeypatch.setattr(join, "execute_join", lambda *args: 0)
    assert pdrun("join", "h:1").err == warning


def test_variables_of_the_dynamic_cluster_and_of_workers_are_known(
    pdrun: Call, plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PDRUN_ROLE",
        "PDRUN_WORKERS",
        "PDRUN_WORKER_ID",
        "PDRUN_WORKER_OF",
        "PDRUN_TOKEN",
    ):
        monkeypatch.setenv(name, "x")
    assert pdrun("train.py").err == ""


def test_explain_shows_words_that_can_be_understood(pdrun: Call) -> None:
    text = pdrun("--dry-run", "--explain", "--nproc-per-node", "auto", "train.py").out
    assert "resources.devices " in text and "one per accelerator, or one per usable CPU" in text
    assert "accelerators-or-cpus" not in text
    assert any(
        line.startswith("program.python ") and sys.executable in line for line in text.splitlines()
    )


@pytest.mark.parametrize("words", [["train.py"], ["join", "h:1"]])
def test_a_bad_token_file_is_blamed_on_where_it_was_named(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.setenv("PDRUN_TOKEN_FILE", "/nowhere/token")
    assert (
        cli.main(["--nodes", "2", "--interface", "lo", *words] if words == ["train.py"] else words)
        == 78
    )
    assert (
        "pdrun: error: PDRUN_TOKEN_FILE /nowhere/token: cannot be read" in capsys.readouterr().err
    )
    more = ["--token-file", "/no/token"]
    assert (
        cli.main(
            ["--nodes", "2", "--interface", "lo", *more, *words]
            if len(words) == 1
            else [*words, *more]
        )
        == 78
    )
    assert "pdrun: error: --token-file /no/token: cannot be read" in capsys.readouterr().err


def test_inside_a_worker_the_outer_jobs_name_is_not_taken(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDRUN_JOB", "outer")
    monkeypatch.setenv("PDRUN_GENERATION", "0")
    assert "job        train-" in pdrun("--dry-run", "train.py").out
    monkeypatch.delenv("PDRUN_GENERATION")
    assert "job        outer" in pdrun("--dry-run", "train.py").out


def test_a_flag_in_the_environment_may_say_no(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setenv("PDRUN_LOCAL", "0")
    monkeypatch.setenv("PDRUN_NODES", "1")
    assert "mode       single" in pdrun("--dry-run", "train.py").out


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "again")]
)
def test_a_limit_of_processes_is_no_fault_of_our_own(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(plan: LaunchPlan) -> int:
        raise error

    monkeypatch.setattr(execute, "execute", broken)
    outcome = pdrun("train.py")
    assert (outcome.code, outcome.err.count("\n")) == (78, 1)
    assert (
        "RLIMIT_NPROC: pdrun could not start another process or thread (ulimit -u: " in outcome.err
    )


def test_a_fault_of_our_own_is_one_honest_line(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tempfile

    def broken(plan: LaunchPlan) -> int:
        raise ZeroDivisionError("a test's own")

    monkeypatch.setattr(execute, "execute", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = pdrun("train.py")
    (line,) = outcome.err.splitlines()
    assert outcome.code == 70
    assert "a bug of pdrun" in line
    assert "ZeroDivisionError: a test's own" in Path(line.rpartition(" ")[2]).read_text()


def test_an_interrupt_is_130(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: LaunchPlan) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "execute", interrupted)
    outcome = pdrun("train.py")
    assert (outcome.code, outcome.err) == (130, "pdrun: interrupted\n")


def test_the_standard_library_is_first_and_no_entry_is_lost() -> None:
    import os

    home = os.__file__.rpartition("/")[0]
    path = ["", "/site", home, "/other", f"{home}/lib-dynload"]
    put_standard_library_first(path)
    assert path == [home, f"{home}/lib-dynload", "", "/site", "/other"]


def test_join_forwards_the_options_of_this_node(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(join, "execute_join", lambda *args: calls.append(args) or 0)
    monkeypatch.setenv("PDRUN_NODE_NAME", "b")
    monkeypatch.setenv("PDRUN_NODES", "7")
    assert pdrun("join", "node0:29400", "--devices", "2").code == 0
    ((endpoint, overrides, sources),) = calls
    assert str(endpoint) == "node0:29400"
    assert overrides == {"resources.devices": 2, "place.node_name": "b"}
    assert sources == {"resources.devices": "--devices", "place.node_name": "PDRUN_NODE_NAME"}


def test_env_says_what_it_found(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PDRUN_TOKEN", "pdrun1-secret")
    monkeypatch.setenv("PET_NNODES", "x")
    outcome = pdrun("env")
    assert outcome.code == 0
    assert "PMIX_RANK=3   (not passed on to workers)" in outcome.out
    assert "SLURM_JOB_ID=12\n" in outcome.out
    assert "secret" not in outcome.out
    assert "error: PET_NNODES: 'x' is not a whole number" in outcome.out


@pytest.mark.parametrize("launcher", ["ssh", "mpirun", "srun", "auto", "none"])
def test_env_takes_every_word_of_launcher(
    pdrun: Call, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv("PDRUN_LAUNCHER", launcher)
    outcome = pdrun("env")
    assert outcome.code == 0 and "is no launcher" not in outcome.out


def test_completion(pdrun: Call) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_PDRUN_COMPLETE" in pdrun("completion", shell).out
