"""MindSpore's page "Automatic parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "search": {
        '`"recursive_programming"`': "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
        '`"sharding_propagation"`': "tests/parallel/auto/test_auto_runs.py::"
        "test_edited_plan_follows_by_propagation",
        '`"dynamic_programming"`': "tests/parallel/auto/test_exact_search.py::"
        "test_search_is_the_minimum_over_all_plans",
        "`auto_pipeline=True`": "tests/parallel/auto/test_auto_runs.py::"
        "test_auto_mesh_chooses_degrees_and_savers",
    },
    "strategy_files": {
        "`save_operator_strategy_file`, `load_operator_strategy_file`, `set_op_strategy_config`": "tests/parallel/auto/test_mindspore_strategies.py::"
        "test_a_file_of_mindspore_runs_and_is_saved",
    },
    "cost_model": {
        "`SAPP` cost model, memory limit": "tests/parallel/auto/test_degrees.py::"
        "test_best_candidate_fits_and_is_the_fastest",
    },
}


@pytest.mark.parametrize("promise", PROMISES["search"])
def test_search(promise: str) -> None:
    check_proof(PROMISES["search"][promise])


@pytest.mark.parametrize("promise", PROMISES["strategy_files"])
def test_strategy_files(promise: str) -> None:
    check_proof(PROMISES["strategy_files"][promise])


@pytest.mark.parametrize("promise", PROMISES["cost_model"])
def test_cost_model(promise: str) -> None:
    check_proof(PROMISES["cost_model"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
