"""MindSpore's page "Multi-copy parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "copies_of_the_batch": {
        "`MicroBatchInterleaved`: copies of the batch": "tests/parallel/training/test_interleaved_copies.py::"
        "test_copies_compute_what_one_process_does",
    },
    "copies_inside_of_a_layer": {
        "`interleaved_parallel`: copies inside of a layer": "tests/parallel/operators/test_interleaved.py::"
        "test_products_of_other_parts_are_computed_during_a_collective",
    },
}


@pytest.mark.parametrize("promise", PROMISES["copies_of_the_batch"])
def test_copies_of_the_batch(promise: str) -> None:
    check_proof(PROMISES["copies_of_the_batch"][promise])


@pytest.mark.parametrize("promise", PROMISES["copies_inside_of_a_layer"])
def test_copies_inside_of_a_layer(promise: str) -> None:
    check_proof(PROMISES["copies_inside_of_a_layer"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
