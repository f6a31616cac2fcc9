"""MindSpore's page "Manual parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "collectives": {
        "`AllReduce`, `AllGather`, `ReduceScatter`, `AlltoAll`, `Broadcast`, `Reduce`": "tests/parallel/collectives/test_collectives_by_hand.py::"
        "test_values_and_gradients_are_those_of_one_process",
    },
    "point_to_point": {
        "`Send`, `Receive`, `NeighborExchange`": "tests/parallel/collectives/test_collectives_by_hand.py::"
        "test_values_and_gradients_are_those_of_one_process",
    },
    "groups": {
        "`create_group`": "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
    },
}


@pytest.mark.parametrize("promise", PROMISES["collectives"])
def test_collectives(promise: str) -> None:
    check_proof(PROMISES["collectives"][promise])


@pytest.mark.parametrize("promise", PROMISES["point_to_point"])
def test_point_to_point(promise: str) -> None:
    check_proof(PROMISES["point_to_point"][promise])


@pytest.mark.parametrize("promise", PROMISES["groups"])
def test_groups(promise: str) -> None:
    check_proof(PROMISES["groups"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
