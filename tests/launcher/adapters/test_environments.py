from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdrun.endpoint import port_for_job
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.detect import ADAPTERS, detect_launcher
from pdrun.launcher.adapters.model import LauncherInfo, Probes
from pdrun.launcher.config.detected import detect_settings
from pdrun.launcher.config.settings import Setting
from pdrun.text import check_name
from tests.launcher.adapters.golden import (
    HERE,
    environ_of,
    format_outcome,
    load_case,
    probes,
    recorded,
    rewrite_case,
)

CASES = sorted((HERE / "cases").glob("*.yaml"))
RECORDINGS = {
    "openmpi-4.1.jsonl": "openmpi",
    "openmpi-5.0.jsonl": "openmpi",
    "mpich-4.0.jsonl": "mpich",
    "mpich-5.0.jsonl": "mpich",
    "intel-mpi-2021.jsonl": "intelmpi",
    "slurm-22.05-srun.jsonl": "slurm-step",
}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_gives_exactly_its_values(path: Path) -> None:
    case = load_case(path)
    text = format_outcome(case)
    if os.environ.get("PDRUN_GOLDEN") == "write":
        rewrite_case(path, text)
        return
    assert text == case["expect"]


def test_every_launcher_has_a_case() -> None:
    first = {load_case(path)["expect"].partition(":")[0] for path in CASES}
    assert first >= {row.name for row in ADAPTERS}


@pytest.mark.parametrize("name", RECORDINGS)
def test_each_task_of_a_recording_has_its_own_rank(name: str) -> None:
    found = [
        detect_launcher(
            environ,
            probes(
                {
                    "host": facts["__host"],
                    "above": [
                        facts["__pid"],
                        facts["__ppid"],
                        "mpirun",
                        "hydra_pmi_proxy",
                        "slurmstepd",
                    ],
                }
            ),
        )
        for environ, facts in recorded(name)
    ]
    assert {one.launcher for one in found} == {RECORDINGS[name]}
    assert {one.kind for one in found} == {"task"}
    assert sorted(one.rank for one in found if one.rank is not None) == list(range(len(found)))
    assert {one.world for one in found} == {len(found)}
    places = {(one.node_rank, one.local_rank) for one in found}
    assert len(places) == len(found)
    assert not any(one.notes or one.ignored for one in found if one.launcher != "slurm-step")


def test_local_ranks_are_read_and_not_computed() -> None:
    ranks = {}
    for environ, _ in recorded("openmpi-5.0.jsonl"):
        found = detect_launcher(environ, Probes())
        ranks[found.rank] = found.local_rank
    assert ranks == {0: 0, 1: 2, 2: 1, 3: 3}


def test_every_value_has_its_variable() -> None:
    for path in CASES:
        case = load_case(path)
        if case["expect"].startswith("exit"):
            continue
        environ = environ_of(case)
        found = detect_launcher(environ, probes(case), case.get("launcher", ""))
        for field in (
            "rank",
            "world",
            "local_rank",
            "node_rank",
            "nodes",
            "hosts",
            "head",
            "port",
            "job_id",
        ):
            if getattr(found, field) not in (None, "", ()) and found.launcher != "none":
                assert found.sources.get(field), (path.stem, field)


NOTHING_SAID: tuple[Setting, ...] = ()
HOSTILE = (
    "",
    " ",
    "-1",
    "x",
    "1_0",
    "\u0663",
    "0x10",
    "1e3",
    "9" * 400,
    "n[1-",
    "n[1-99999999]",
    "a,,b",
    "-oProxyCommand=x",
    "$(x)",
    "a;b",
    "[" * 5000,
    '{"cluster": 3, "task": []}',
    "[1, 2]",
    "null",
    "NaN",
    "\udcff",
    "/nope",
    "1(x99999999)",
    ";tcp4://127.0.0.1:99999",
    "tcp",
    "a\nb",
)


def test_no_value_of_any_variable_crashes_or_hangs_a_reader() -> None:
    """
    Every variable of every case with every hostile value: an answer or an error that names a
    variable.
    """
    tried = 0
    for path in CASES:
        case = load_case(path)
        environ = environ_of(case)
        if (
            "recorded" in case
            or len(environ) > 40
            or any(len(value) > 5000 for value in environ.values())
        ):
            continue
        for name in environ:
            for value in HOSTILE:
                changed = {**environ, name: value}
                try:
                    detect_launcher(changed, probes(case), case.get("launcher", ""))
                except PdrunError as error:
                    assert len(str(error)) < 600, (path.stem, name)
                    assert "\n" not in str(error), (path.stem, name)
                try:
                    detect_settings(NOTHING_SAID, changed, probes(case))
                except PdrunError as error:
                    assert error.exit_code in (2, 78), (path.stem, name)
                tried += 1
    assert tried > 5000


def test_a_derived_port_is_below_the_ephemeral_range() -> None:
    ports = {port_for_job(f"slurm-{number}.0") for number in range(2000)}
    assert min(ports) >= 20000
    assert max(ports) < 30000
    assert len(ports) > 1700
    assert port_for_job("slurm-7.0") == 23190


def test_every_job_name_is_valid_in_a_path() -> None:
    for job in (
        "7.0",
        "a" * 300,
        "\u019258",
        "prterun-h-1@1",
        "../../x",
        "-rf",
        "x" * 50 + "y",
        "\udcff",
    ):
        name = LauncherInfo("flux", job_id=job).job_name
        assert check_name(name, where="x") == name
    assert (
        LauncherInfo("flux", job_id="a" * 300).job_name
        != LauncherInfo("flux", job_id="a" * 301).job_name
    )
    assert LauncherInfo("slurm-step", job_id="7.0", attempt=2).job_name == "slurm-7.0-r2"
    assert LauncherInfo("mpich").job_name == ""
