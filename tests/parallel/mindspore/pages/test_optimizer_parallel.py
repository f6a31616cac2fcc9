"""MindSpore's page "Optimizer parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "levels": {
        "`enable_parallel_optimizer`, `hsdp()`": "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
        '`optimizer_level="level1"`: state, gathered weights stay for the step': "tests/parallel/zero/test_offload_and_memory.py::"
        "test_levels_take_less_and_less",
        '`optimizer_level="level2"`: and gradients': "tests/parallel/zero/test_offload_and_memory.py::"
        "test_levels_take_less_and_less",
        '`optimizer_level="level3"`: and weights': "tests/parallel/zero/test_offload_and_memory.py::"
        "test_levels_take_less_and_less",
    },
    "shard_size_and_threshold": {
        "`shard_size`, `optimizer_weight_shard_size`": "tests/parallel/test_transparency.py::"
        "test_sampled_product",
        "`threshold`, `parallel_optimizer_threshold` (64 KB)": "tests/parallel/zero/test_optimizer_options.py::"
        "test_the_threshold_can_have_a_unit",
    },
    "opt_out": {
        "`Parameter.parallel_optimizer = False`": "tests/parallel/zero/test_optimizer_options.py::"
        "test_a_weight_can_opt_out",
    },
}


@pytest.mark.parametrize("promise", PROMISES["levels"])
def test_levels(promise: str) -> None:
    check_proof(PROMISES["levels"][promise])


@pytest.mark.parametrize("promise", PROMISES["shard_size_and_threshold"])
def test_shard_size_and_threshold(promise: str) -> None:
    check_proof(PROMISES["shard_size_and_threshold"][promise])


@pytest.mark.parametrize("promise", PROMISES["opt_out"])
def test_opt_out(promise: str) -> None:
    check_proof(PROMISES["opt_out"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
