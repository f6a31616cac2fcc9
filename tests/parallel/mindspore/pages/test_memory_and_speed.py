"""MindSpore's page "Memory and speed": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "gradient_accumulation": {
        "`GradAccumulation(net, micro_size)`": "tests/parallel/zero/test_optimizer_options.py::"
        "test_micro_batches_can_be_added_up",
    },
    "multiple_copies": {
        "`MicroBatchInterleaved`": "tests/parallel/training/test_interleaved_copies.py::"
        "test_copies_compute_what_one_process_does",
    },
    "recompute": {
        "`Cell.recompute()`": "tests/parallel/test_transparency.py::test_sampled_product",
        "`Primitive.recompute()`": "tests/parallel/operators/test_recomputed_operators.py::"
        "test_results_do_not_live_until_the_backward_pass",
        "`mp_comm_recompute=False`": "tests/parallel/model/test_kept_collectives.py::"
        "test_results_of_collectives_are_kept",
        "`recompute_slice_activation=True`": "tests/parallel/model/test_kept_collectives.py::"
        "test_inputs_are_kept_as_parts",
    },
    "host_and_device": {
        "`Cell.offload`, `memory_offload`": "tests/parallel/zero/test_offload_and_memory.py::"
        "test_activations_really_go",
        "optimizer on the host": "tests/parallel/zero/test_offload_and_memory.py::"
        "test_offloading_changes_no_bit",
        '`Primitive.set_device("CPU")`: an operator or cell on the host': "tests/parallel/zero/test_host_modules.py::"
        "test_a_module_on_the_host_changes_no_bit",
    },
    "communication_fusion": {
        "`comm_fusion`, `set_comm_fusion(id)`": "tests/parallel/zero/test_optimizer_options.py::"
        "test_modules_with_one_number_share_a_bucket",
    },
}


@pytest.mark.parametrize("promise", PROMISES["gradient_accumulation"])
def test_gradient_accumulation(promise: str) -> None:
    check_proof(PROMISES["gradient_accumulation"][promise])


@pytest.mark.parametrize("promise", PROMISES["multiple_copies"])
def test_multiple_copies(promise: str) -> None:
    check_proof(PROMISES["multiple_copies"][promise])


@pytest.mark.parametrize("promise", PROMISES["recompute"])
def test_recompute(promise: str) -> None:
    check_proof(PROMISES["recompute"][promise])


@pytest.mark.parametrize("promise", PROMISES["host_and_device"])
def test_host_and_device(promise: str) -> None:
    check_proof(PROMISES["host_and_device"][promise])


@pytest.mark.parametrize("promise", PROMISES["communication_fusion"])
def test_communication_fusion(promise: str) -> None:
    check_proof(PROMISES["communication_fusion"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
