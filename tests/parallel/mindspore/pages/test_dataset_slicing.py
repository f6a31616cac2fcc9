"""MindSpore's page "Dataset slicing": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "whole_and_by_rows": {
        '`dataset_strategy="data_parallel"`': "tests/parallel/data/test_loader.py::"
        "test_dataset_strategies_give_the_same_loss",
        '`dataset_strategy="full_batch"`, `full_batch=True`': "tests/parallel/data/test_loader.py::"
        "test_dataset_strategies_give_the_same_loss",
        "`dataset_strategy=((8, 1), (8,))`: rows": "tests/parallel/data/test_loader.py::"
        "test_counts_slice_rows_only",
    },
    "other_dims_and_layouts": {
        "`dataset_strategy=((1, 8), (1, 8))`: another dim": "tests/parallel/operators/test_input_layouts.py::"
        "test_numbers_are_those_of_one_process",
        "`dataset_strategy` with layouts": "tests/parallel/operators/test_input_layouts.py::"
        "test_numbers_are_those_of_one_process",
    },
}


@pytest.mark.parametrize("promise", PROMISES["whole_and_by_rows"])
def test_whole_and_by_rows(promise: str) -> None:
    check_proof(PROMISES["whole_and_by_rows"][promise])


@pytest.mark.parametrize("promise", PROMISES["other_dims_and_layouts"])
def test_other_dims_and_layouts(promise: str) -> None:
    check_proof(PROMISES["other_dims_and_layouts"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
