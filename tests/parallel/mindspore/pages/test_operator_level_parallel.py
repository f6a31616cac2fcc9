"""MindSpore's page "Operator-level parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "in_and_out_strategy": {
        "`Primitive.shard(in_strategy)` with counts": "tests/parallel/operators/test_operators.py::"
        "test_the_tutorial_network_has_one_sequence_of_losses",
        "`shard` with layouts": "tests/parallel/operators/test_operators.py::"
        "test_layouts_are_accepted_in_every_form",
        "`out_strategy`": "tests/parallel/operators/test_finer_mesh.py::"
        "test_meshes_get_the_axes_that_layouts_need",
    },
    "layout": {
        "`Layout(device_matrix, alias_name)`": "tests/parallel/layouts/test_device_matrix.py::"
        "test_a_layout_by_names",
        "the alias `interleaved_parallel`": "tests/parallel/operators/test_interleaved.py::"
        "test_parts_have_the_numbers_of_one_process",
        "`Layout(rank_list=...)`": "tests/parallel/operators/test_finer_mesh.py::"
        "test_meshes_get_the_axes_that_layouts_need",
        "strategies without a mesh": "tests/parallel/operators/test_finer_mesh.py::"
        "test_meshes_get_the_axes_that_layouts_need",
    },
    "functional_parallel": {
        "`Cell.shard`, `ms.parallel.shard(fn, ...)`": "tests/parallel/operators/test_operators.py::"
        "test_layouts_inside_a_model",
        "`reshard(tensor, layout)`": "tests/parallel/operators/test_operators.py::"
        "test_layouts_inside_a_model",
    },
    "repeated_calculation_and_redistribution": {
        "repeated calculation": "tests/parallel/operators/test_operators.py::"
        "test_repeated_computation_changes_nothing",
        "`TensorRedistribution`": "tests/parallel/layouts/test_redistribute.py::"
        "test_random_layouts_against_dense_tensors",
    },
    "propagation": {
        "operators without a strategy": "tests/parallel/operators/test_operators.py::"
        "test_propagation_golden",
    },
}


@pytest.mark.parametrize("promise", PROMISES["in_and_out_strategy"])
def test_in_and_out_strategy(promise: str) -> None:
    check_proof(PROMISES["in_and_out_strategy"][promise])


@pytest.mark.parametrize("promise", PROMISES["layout"])
def test_layout(promise: str) -> None:
    check_proof(PROMISES["layout"][promise])


@pytest.mark.parametrize("promise", PROMISES["functional_parallel"])
def test_functional_parallel(promise: str) -> None:
    check_proof(PROMISES["functional_parallel"][promise])


@pytest.mark.parametrize("promise", PROMISES["repeated_calculation_and_redistribution"])
def test_repeated_calculation_and_redistribution(promise: str) -> None:
    check_proof(PROMISES["repeated_calculation_and_redistribution"][promise])


@pytest.mark.parametrize("promise", PROMISES["propagation"])
def test_propagation(promise: str) -> None:
    check_proof(PROMISES["propagation"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
