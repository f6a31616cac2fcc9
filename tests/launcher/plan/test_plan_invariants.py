"""What holds for every plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.backends.base import Backend
from pdrun.endpoint import Endpoint
from pdrun.errors import PdrunError
from pdrun.launcher.config.job_key import format_command, make_job_key
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Program, Resources
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.environment import display_value, remove_launcher_variables
from pdrun.launcher.plan.model import BackendFacts, Facts
from pdrun.launcher.plan.plan import (
    MAX_SPEC_BYTES,
    choose_node_name,
    make_plan,
    plan_simulated_nodes,
    program_argv,
)
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import Envelope, Welcome
from pdrun.topology import CpuSet, Device

FACTS = Facts(
    hostname="host1",
    environ={"PATH": "/bin", "HOME": "/home/u"},
    cwd="/work",
    python="/usr/bin/python3",
    python_version="3.11.7",
    torch_version="2.13.0",
    pdrun_version="0.1.0",
    cpus=CpuSet(tuple(range(8))),
    backends=(BackendFacts("cpu", True, "always available", (Device("cpu", 0),)),),
    addresses=(("lo", "127.0.0.1"),),
    uid=1000,
    route_address="127.0.0.1",
)
SCRIPT = Program("script", "train.py", ("--lr", "3"))


def machine(cpus: int, quota: float | None, cards: int) -> Facts:
    found = tuple(Device("cuda", index, str(index)) for index in range(cards))
    backends = (BackendFacts("cuda", bool(cards), "by a test", found), *FACTS.backends)
    return dataclasses.replace(FACTS, cpus=CpuSet(tuple(range(cpus)), quota), backends=backends)


@given(
    nodes=st.integers(1, 4),
    devices=st.one_of(st.just("auto"), st.integers(1, 9)),
    cpus=st.integers(1, 40),
    quota=st.one_of(st.none(), st.floats(0.1, 50)),
    cards=st.integers(0, 16),
)
def test_simulated_nodes_share_a_machine_without_overlap(
    nodes: int, devices: int | str, cpus: int, quota: float | None, cards: int
) -> None:
    spec = JobSpec(
        SCRIPT, Resources(nodes=nodes, devices=devices), place=ClusterOptions(local=True)
    )  # type: ignore[arg-type]
    facts = machine(cpus, quota, cards)
    try:
        whole = make_plan(spec, facts, {})
        parts = plan_simulated_nodes(whole, facts) if whole.mode == "local" else (whole,)
    except PdrunError as error:
        assert cards
        assert error.exit_code == 2
        return
    workers = [worker for part in parts for worker in part.workers]
    assert len(parts) == nodes
    assert len(workers) == nodes * len(parts[0].workers)
    given_cpus = [cpu for worker in workers for cpu in worker.cpus]
    assert len(given_cpus) == len(set(given_cpus))
    assert all(worker.threads >= 1 for worker in workers)
    cards_given = [worker.device.name for worker in workers if worker.device]
    assert len(cards_given) == len(set(cards_given)) == (len(workers) if cards else 0)


def test_equal_arguments_give_equal_plans() -> None:
    spec = JobSpec(SCRIPT, Resources(nodes=2), place=ClusterOptions(local=True))
    assert make_plan(spec, FACTS, {}) == make_plan(spec, FACTS, {})
    assert plan_simulated_nodes(make_plan(spec, FACTS, {}), FACTS) == plan_simulated_nodes(
        make_plan(spec, FACTS, {}), FACTS
    )


def test_simulated_plans_equal_those_of_agents_with_the_same_options() -> None:
    whole = make_plan(
        JobSpec(SCRIPT, Resources(nodes=2, devices=2), place=ClusterOptions(local=True)), FACTS, {}
    )
    first, second = plan_simulated_nodes(whole, FACTS)
    assert (first.mode, first.node, second.mode, second.node) == ("head", "node0", "join", "node1")
    assert first.job == second.job == whole.job
    assert JobSpec.from_json(second.spec.to_json()) == second.spec


def test_the_job_key_depends_on_the_command_and_not_on_the_node() -> None:
    one = JobSpec(SCRIPT, Resources(nodes=2))
    assert make_job_key(one) == make_job_key(
        dataclasses.replace(one, place=ClusterOptions(node_rank=1), env={"A": "1"})
    )
    assert make_job_key(one) != make_job_key(dataclasses.replace(one, resources=Resources(nodes=3)))
    assert make_job_key(one) != make_job_key(
        dataclasses.replace(one, program=Program("script", "train.py", ("--lr", "4")))
    )
    assert make_job_key(dataclasses.replace(one, job="mine")) == "mine"


@given(st.text(min_size=1, max_size=80), st.lists(st.text(max_size=20), max_size=4))
def test_every_job_key_is_a_valid_name(target: str, args: list[str]) -> None:
    from pdrun.text import check_name

    key = make_job_key(JobSpec(Program("script", target, tuple(args))))
    assert check_name(key, where="test") == key


def test_command_lines_of_workers() -> None:
    assert program_argv(Program("script", "a.py", ("x",)), "/py") == ("/py", "a.py", "x")
    assert program_argv(Program("script", "-c", ()), "/py") == ("/py", "./-c")
    assert program_argv(Program("module", "a.b", ("x",), python="py3"), "/py") == (
        "py3",
        "-m",
        "a.b",
        "x",
    )
    assert program_argv(Program("command", "./a.out", ("x",)), "/py") == ("./a.out", "x")


def test_no_plan_listens_on_all_interfaces() -> None:
    two = Resources(nodes=2)
    for spec in (
        JobSpec(SCRIPT),
        JobSpec(SCRIPT, two),
        JobSpec(SCRIPT, two, place=ClusterOptions(local=True)),
    ):
        made = make_plan(spec, FACTS, {})
        assert made.listen == "127.0.0.1"
        assert made.scheduler is None or made.scheduler.host == "127.0.0.1"


def test_nodes_compare_their_commands_as_text() -> None:
    one = JobSpec(Program("script", "slow.py", ("2", "a b", "x\ny")), Resources(nodes=2))
    assert format_command(one) == "pdrun --nodes 2 slow.py 2 'a b' 'x\\ny'"
    assert make_plan(one, FACTS, {}).compared["command"] == format_command(
        dataclasses.replace(one, job="q")
    )
    module = Program("module", "a.b", ())
    assert format_command(JobSpec(module)) == "pdrun --nodes 1 -m a.b"
    assert (
        format_command(JobSpec(Program("command", "a.b", ()))) == "pdrun --nodes 1 --no-python a.b"
    )


@given(st.lists(st.text(max_size=300), max_size=4), st.lists(st.text(max_size=300), max_size=4))
def test_a_command_text_is_short_and_distinguishes_commands(one: list[str], two: list[str]) -> None:
    texts = [format_command(JobSpec(Program("script", "a.py", tuple(args)))) for args in (one, two)]
    assert (texts[0] == texts[1]) == (one == two)
    assert all(text.isprintable() and len(text) < 500 for text in texts)


def test_several_nodes_on_the_schedulers_machine_have_different_names() -> None:
    def name(local: bool, **place: object) -> str:
        spec = JobSpec(
            SCRIPT,
            Resources(nodes=3),
            place=ClusterOptions(scheduler=Endpoint("host1", 5), **place),
        )  # type: ignore[arg-type]
        return choose_node_name(spec, dataclasses.replace(FACTS, is_scheduler_local=local))

    assert [name(True, node_rank=rank) for rank in (0, 1, 2)] == ["host1", "host1-1", "host1-2"]
    assert [name(False, node_rank=rank) for rank in (0, 1)] == ["host1", "host1"]
    assert (name(True), name(True, node_rank=1, node_name="mine")) == ("host1", "mine")


def test_an_unknown_scheduler_name_is_the_error_and_not_the_route() -> None:
    facts = dataclasses.replace(
        FACTS, route_address="", is_scheduler_local=False, scheduler_error="the name is unknown"
    )
    spec = JobSpec(SCRIPT, Resources(nodes=2), place=ClusterOptions(scheduler=Endpoint("n", 5)))
    with pytest.raises(PdrunError, match=r"^--scheduler: the name is unknown; check the name"):
        make_plan(spec, facts, {"place.scheduler": "--scheduler"})
    made = make_plan(
        dataclasses.replace(spec, place=dataclasses.replace(spec.place, interface="lo")), facts, {}
    )
    assert made.mode == "join" and facts.scheduler_error in made.notes


@pytest.mark.parametrize(
    "place",
    [
        ClusterOptions(),
        ClusterOptions(local=True),
        ClusterOptions(scheduler=Endpoint("n", 5)),
        ClusterOptions(hosts=(Host("a"), Host("b"))),
        ClusterOptions(scheduler=Endpoint("n", 5), serve=True),
        ClusterOptions(hosts=(Host("a"),), launcher="mpirun"),
    ],
)
@pytest.mark.parametrize("env", [False, True])
def test_a_specification_too_large_for_a_message_is_refused(
    place: ClusterOptions, env: bool
) -> None:
    long = '"' * (
        MAX_SPEC_BYTES // 4
    )  # each takes four bytes: it is written as JSON, and that is put into a message
    program = SCRIPT if env else dataclasses.replace(SCRIPT, args=(long,))
    nodes = 1 if place.serve or place.launcher else 2
    spec = JobSpec(program, Resources(nodes=nodes), place=place, env={"LONG": long} if env else {})
    with pytest.raises(
        PdrunError, match=r"--env variables .* must be at most 983,040 bytes, got 98\d,\d{3}"
    ):
        make_plan(spec, FACTS, {})
    alone = dataclasses.replace(spec, place=ClusterOptions(), resources=Resources(nodes=1))
    assert make_plan(alone, FACTS, {}).mode == "single", "nothing is sent to other nodes"
    assert encode(
        Envelope(
            "a" * 32, 0, 0, Welcome("j" * 64, "r" * 64, "x" * MAX_SPEC_BYTES, "s" * 32, 1.0, 10.0)
        )
    )


def test_no_route_is_an_error_and_never_a_smaller_job() -> None:
    with pytest.raises(PdrunError, match="no route to other machines"):
        make_plan(
            JobSpec(SCRIPT, Resources(nodes=2)), dataclasses.replace(FACTS, route_address=""), {}
        )


LAUNCHERS = """
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR TORCHELASTIC_RUN_ID PET_NNODES OMPI_COMM_WORLD_RANK OMPI_MCA_orte_hnp_uri
    PMI_FD PMI_RANK PMIX_SERVER_URI2 PALS_RANKID MPI_LOCALRANKID HYDI_CONTROL_FD MV2_COMM_WORLD_RANK SLURM_PROCID
    SLURM_STEP_ID SLURM_STEP_NODELIST JSM_NAMESPACE_RANK MS_ROLE MS_WORKER_NUM RANK_ID PDRUN_TOKEN PDRUN_TOKEN_FILE
    PDRUN_NODES
"""
KEPT = """
    PATH HOME LD_LIBRARY_PATH PYTHONPATH SLURM_JOB_ID SLURM_CPUS_PER_TASK SLURM_ARRAY_TASK_ID PBS_JOBID LSB_JOBID
    CUDA_VISIBLE_DEVICES OMP_NUM_THREADS NCCL_DEBUG OMPI_MCA_btl HCCL_CONNECT_TIMEOUT RANK_TABLE_FILE MY_RANK
    WORLD_SIZE_X
"""


def test_variables_of_launchers_are_removed() -> None:
    kept, gone = remove_launcher_variables(dict.fromkeys([*LAUNCHERS.split(), *KEPT.split()], "x"))
    assert set(gone) == set(LAUNCHERS.split())
    assert set(kept) == set(KEPT.split())


@pytest.mark.parametrize(
    "name", ["API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "db_password", "PDRUN_TOKEN"]
)
def test_secrets_are_not_shown(name: str) -> None:
    assert display_value(name, "abc") == "(hidden)"


def test_a_plan_names_the_collective_of_its_backend() -> None:
    assert make_plan(JobSpec(SCRIPT), FACTS, {}).collective == "gloo"
    assert {field.name for field in dataclasses.fields(Backend)} >= {
        "name",
        "collective",
        "variables",
    }


@pytest.mark.parametrize("bind", ["cores", "numa"])
def test_an_impossible_binding_is_refused(bind: str) -> None:
    facts = machine(2, None, 0)
    sources = {"resources.bind": "--bind"}
    spec = JobSpec(SCRIPT, Resources(devices=4, bind=bind))  # type: ignore[arg-type]
    with pytest.raises(
        PdrunError,
        match=rf"--bind: {bind} is not possible: 2 usable core\(s\) for 4 .*--bind auto",
    ):
        make_plan(spec, facts, sources)
    local = dataclasses.replace(
        spec, resources=Resources(3, 1, bind=bind), place=ClusterOptions(local=True)
    )  # type: ignore[arg-type]
    with pytest.raises(PdrunError, match=rf"{bind} is not possible"):
        make_plan(local, facts, sources)
    assert not any(
        worker.cpus
        for worker in make_plan(JobSpec(SCRIPT, Resources(devices=4)), facts, {}).workers
    )
    enough = JobSpec(SCRIPT, Resources(devices=2, bind=bind))  # type: ignore[arg-type]
    assert all(worker.cpus for worker in make_plan(enough, facts, sources).workers)


@pytest.mark.parametrize(
    ("local", "serve", "mode"),
    [(True, None, "head"), (False, None, "join"), (False, True, "head")],
)
def test_node_0_runs_a_scheduler_with_a_foreign_address_only_with_serve(
    local: bool, serve: bool | None, mode: str
) -> None:
    """Otherwise two hosts that both claim rank 0 would run a scheduler each."""
    place = ClusterOptions(scheduler=Endpoint("h1", 7777), node_rank=0, serve=serve)
    facts = dataclasses.replace(FACTS, is_scheduler_local=local)
    made = make_plan(
        JobSpec(SCRIPT, Resources(nodes=2), place=place), facts, {"place.serve": "--serve"}
    )
    assert made.mode == mode
    assert any("--serve: run the scheduler here" in note for note in made.notes) == (mode == "join")


@pytest.mark.parametrize("serve", [True, False])
def test_a_scheduler_whose_name_is_loopback_uses_an_address_of_the_network(serve: bool) -> None:
    """
    Debian writes ``127.0.1.1 HOST`` into /etc/hosts: a second node on this machine has to find the
    same address.
    """
    facts = dataclasses.replace(
        FACTS, is_scheduler_local=True, is_loopback_name=True, route_address="10.0.0.5"
    )
    place = ClusterOptions(scheduler=Endpoint("here", 7777), serve=serve)
    made = make_plan(JobSpec(SCRIPT, Resources(nodes=2), place=place), facts, {})
    assert made.scheduler == Endpoint("10.0.0.5", 7777)
    assert made.mode == ("head" if serve else "join")
