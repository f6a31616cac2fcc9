from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdrun.endpoint import port_for
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.detect import LAUNCHERS, detect
from pdrun.launcher.adapters.model import Found, Probes
from pdrun.launcher.config.detected import around
from pdrun.launcher.config.settings import Wish
from pdrun.names import check_name
from tests.launcher.adapters.golden import (
    HERE,
    environ_of,
    load,
    outcome,
    probes,
    recorded,
    rewrite,
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
def test_an_environment_gives_exactly_what_is_stated(path: Path) -> None:
    case = load(path)
    text = outcome(case)
    if os.environ.get("PDRUN_GOLDEN") == "write":
        rewrite(path, text)
        return
    assert text == case["expect"]


def test_every_launcher_has_a_case() -> None:
    first = {load(path)["expect"].partition(":")[0] for path in CASES}
    assert first >= {row.name for row in LAUNCHERS}


@pytest.mark.parametrize("name", RECORDINGS)
def test_each_task_of_a_recording_has_its_own_rank(name: str) -> None:
    found = [
        detect(
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


def test_a_local_rank_is_taken_and_not_computed() -> None:
    ranks = {}
    for environ, _ in recorded("openmpi-5.0.jsonl"):
        found = detect(environ, Probes())
        ranks[found.rank] = found.local_rank
    assert ranks == {0: 0, 1: 2, 2: 1, 3: 3}


def test_every_field_that_is_known_names_its_variable() -> None:
    for path in CASES:
        case = load(path)
        if case["expect"].startswith("exit"):
            continue
        environ = environ_of(case)
        found = detect(environ, probes(case), case.get("launcher", ""))
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


NOTHING_SAID: tuple[Wish, ...] = ()
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
        case = load(path)
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
                    detect(changed, probes(case), case.get("launcher", ""))
                except PdrunError as error:
                    assert len(str(error)) < 600, (path.stem, name)
                    assert "\n" not in str(error), (path.stem, name)
                try:
                    around(NOTHING_SAID, changed, probes(case))
                except PdrunError as error:
                    assert error.exit_code in (2, 78), (path.stem, name)
                tried += 1
    assert tried > 5000


def test_a_derived_port_is_below_those_that_systems_give_away() -> None:
    ports = {port_for(f"slurm-{number}.0") for number in range(2000)}
    assert min(ports) >= 20000
    assert max(ports) < 30000
    assert len(ports) > 1700
    assert port_for("slurm-7.0") == 23190


def test_a_jobs_name_is_fit_for_a_path_whatever_the_id_is() -> None:
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
        name = Found("flux", job_id=job).job_name
        assert check_name(name, where="x") == name
    assert Found("flux", job_id="a" * 300).job_name != Found("flux", job_id="a" * 301).job_name
    assert Found("slurm-step", job_id="7.0", attempt=2).job_name == "slurm-7.0-r2"
    assert Found("mpich").job_name == ""
