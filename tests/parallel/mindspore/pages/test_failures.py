"""MindSpore's page "Failures": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "recovery": {
        "`MS_ENABLE_RECOVERY`, `MS_RECOVERY_PATH`": "tests/rendezvous/clients/test_dynamic.py::"
        "test_recovery_of_mindspore_is_a_journal_in_its_folder",
        "`MS_ENABLE_RECOVERY`: a worker registers again with its `MS_NODE_ID`": "tests/rendezvous/clients/test_dynamic.py::"
        "test_a_lost_worker_comes_back_under_its_name",
        "disaster recovery: a worker is started again": "tests/e2e/test_examples.py::"
        "test_elastic_training_goes_on_where_it_stopped",
    },
    "timeouts": {
        "`MS_NODE_TIMEOUT`": "tests/chaos/test_silence.py::test_silence",
    },
    "kubernetes": {
        "`ms-operator`: MSJob": "tests/launcher/k8s/test_manifests.py::test_manifests",
    },
}


@pytest.mark.parametrize("promise", PROMISES["recovery"])
def test_recovery(promise: str) -> None:
    check_proof(PROMISES["recovery"][promise])


@pytest.mark.parametrize("promise", PROMISES["timeouts"])
def test_timeouts(promise: str) -> None:
    check_proof(PROMISES["timeouts"][promise])


@pytest.mark.parametrize("promise", PROMISES["kubernetes"])
def test_kubernetes(promise: str) -> None:
    check_proof(PROMISES["kubernetes"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
