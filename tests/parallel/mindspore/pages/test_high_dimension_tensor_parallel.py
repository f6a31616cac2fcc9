"""MindSpore's page "High-dimension tensor parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "two_dimensions": {
        "`enable_nd_tp`, 2D": "tests/parallel/operators/test_matmul_grid.py::"
        "test_the_bytes_of_the_formulas",
    },
    "three_dimensions": {
        "`enable_nd_tp`, 3D": "tests/parallel/operators/test_matmul_grid.py::"
        "test_products_have_the_numbers_of_one_process",
    },
}


@pytest.mark.parametrize("promise", PROMISES["two_dimensions"])
def test_two_dimensions(promise: str) -> None:
    check_proof(PROMISES["two_dimensions"][promise])


@pytest.mark.parametrize("promise", PROMISES["three_dimensions"])
def test_three_dimensions(promise: str) -> None:
    check_proof(PROMISES["three_dimensions"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
