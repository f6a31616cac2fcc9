"""MindSpore's page "Parameter server": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "training": {
        "`set_param_ps()`": "tests/parallel/servers/test_training.py::"
        "test_sync_with_sgd_has_the_bits_of_data_parallel",
    },
    "roles": {
        "`MS_ROLE=MS_PSERVER`, `MS_SERVER_NUM`": "tests/launcher/config/test_detected.py::"
        "test_servers_of_a_launcher_are_those_of_the_job",
    },
    "tables": {
        "`init_in_server`, `EmbeddingLookup`": "tests/parallel/servers/test_training.py::"
        "test_served_embeddings_have_any_id_and_need_a_glob",
    },
}


@pytest.mark.parametrize("promise", PROMISES["training"])
def test_training(promise: str) -> None:
    check_proof(PROMISES["training"][promise])


@pytest.mark.parametrize("promise", PROMISES["roles"])
def test_roles(promise: str) -> None:
    check_proof(PROMISES["roles"][promise])


@pytest.mark.parametrize("promise", PROMISES["tables"])
def test_tables(promise: str) -> None:
    check_proof(PROMISES["tables"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
