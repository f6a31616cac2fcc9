"""MindSpore's page "Data parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "dataset": {
        '`parallel_mode="data_parallel"`': "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
        "`num_shards`, `shard_id`": "tests/parallel/data/test_loader.py::"
        "test_the_samples_do_not_depend_on_the_ranks",
    },
    "gradients": {
        "`gradients_mean=True`": "tests/parallel/zero/test_optimizer_options.py::"
        "test_micro_batches_can_be_added_up",
    },
    "parameters": {
        "`parameter_broadcast=True`": "tests/parallel/checkpoint/test_resume_compatibility.py::"
        "test_all_ranks_start_with_rank_0s_buffers_of_any_type",
        "`layerwise_parallel` of a parameter": "tests/parallel/test_model_axes.py::"
        "test_an_optimizer_with_state_and_groups_follows_its_weights",
    },
    "precision": {
        "`gradient_fp32_sync`, `enable_fp32_communication`": "tests/parallel/test_model_axes.py::"
        "test_narrow_types",
    },
}


@pytest.mark.parametrize("promise", PROMISES["dataset"])
def test_dataset(promise: str) -> None:
    check_proof(PROMISES["dataset"][promise])


@pytest.mark.parametrize("promise", PROMISES["gradients"])
def test_gradients(promise: str) -> None:
    check_proof(PROMISES["gradients"][promise])


@pytest.mark.parametrize("promise", PROMISES["parameters"])
def test_parameters(promise: str) -> None:
    check_proof(PROMISES["parameters"][promise])


@pytest.mark.parametrize("promise", PROMISES["precision"])
def test_precision(promise: str) -> None:
    check_proof(PROMISES["precision"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
