"""MindSpore's page "Starting": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "msrun": {
        "`msrun`": "tests/launcher/translate/test_command_lines.py::"
        "test_options_of_torchrun_and_msrun_can_be_given_to_pdrun",
    },
    "dynamic_cluster": {
        "dynamic cluster (`MS_ROLE`, `MS_SCHED_HOST`, `MS_SCHED_PORT`, `MS_WORKER_NUM`, `MS_NODE_ID`)": "tests/rendezvous/clients/test_dynamic.py::"
        "test_asked_for_ranks_are_given_and_mindspores_names_work",
        "a process with `MS_ROLE=MS_SCHED`": "tests/rendezvous/clients/test_dynamic.py::"
        "test_pdrun_scheduler_serves_and_recovers_a_cluster_of_mindspores_variables",
    },
    "rank_table": {
        "rank table (`RANK_TABLE_FILE`, `RANK_ID`, `DEVICE_ID`)": "tests/parallel/startup/test_rank_table.py::"
        "test_processes_of_a_table_form_one_world",
    },
    "mpirun": {
        "`mpirun`": "tests/e2e/clusters/test_mpirun.py::"
        "test_init_finds_the_other_ranks_on_one_host",
    },
    "init": {
        "`init()`, `get_rank()`, `get_group_size()`": "tests/parallel/startup/test_init.py::"
        "test_under_pdrun",
        "a script of MindSpore, with its own `init()`": "tests/parallel/mindspore/test_own_init.py::"
        "test_workers_and_scheduler_get_mindspores_variables",
    },
}


@pytest.mark.parametrize("promise", PROMISES["msrun"])
def test_msrun(promise: str) -> None:
    check_proof(PROMISES["msrun"][promise])


@pytest.mark.parametrize("promise", PROMISES["dynamic_cluster"])
def test_dynamic_cluster(promise: str) -> None:
    check_proof(PROMISES["dynamic_cluster"][promise])


@pytest.mark.parametrize("promise", PROMISES["rank_table"])
def test_rank_table(promise: str) -> None:
    check_proof(PROMISES["rank_table"][promise])


@pytest.mark.parametrize("promise", PROMISES["mpirun"])
def test_mpirun(promise: str) -> None:
    check_proof(PROMISES["mpirun"][promise])


@pytest.mark.parametrize("promise", PROMISES["init"])
def test_init(promise: str) -> None:
    check_proof(PROMISES["init"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
