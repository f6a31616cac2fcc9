"""MindSpore's page "Checkpoints": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "saving_and_loading": {
        "`save_checkpoint`, `load_checkpoint`": "tests/parallel/checkpoint/test_checkpoints.py::"
        "test_saved_on_some_ranks_resumed_on_others",
        "`strategy_ckpt_config`, `save_param_strategy_file`": "tests/parallel/checkpoint/test_transform.py::"
        "test_strategy_files_are_converted",
    },
    "transformation": {
        "`transform_checkpoints`, `merge_sliced_parameter`": "tests/parallel/checkpoint/test_transform.py::"
        "test_any_mesh_to_any_other",
        "`rank_list_for_transform`": "tests/parallel/layouts/test_placement.py::"
        "test_the_list_of_ranks_is_enough_and_tight",
        "`merge_pipeline_strategys`": "tests/parallel/layouts/test_placement.py::"
        "test_a_merged_file_of_a_pipeline",
    },
    "inference": {
        "`load_distributed_checkpoint`, `infer_predict_layout`": "tests/parallel/checkpoint/test_checkpoints.py::"
        "test_saved_on_some_ranks_resumed_on_others",
        "`unified_safetensors`": "tests/parallel/zero/test_offload_and_memory.py::"
        "test_export_and_import",
    },
}


@pytest.mark.parametrize("promise", PROMISES["saving_and_loading"])
def test_saving_and_loading(promise: str) -> None:
    check_proof(PROMISES["saving_and_loading"][promise])


@pytest.mark.parametrize("promise", PROMISES["transformation"])
def test_transformation(promise: str) -> None:
    check_proof(PROMISES["transformation"][promise])


@pytest.mark.parametrize("promise", PROMISES["inference"])
def test_inference(promise: str) -> None:
    check_proof(PROMISES["inference"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
