"""MindSpore's page "Pipeline parallel": each promise has a test."""

from __future__ import annotations

import pytest

from tests.parallel.mindspore.promises import PROOF_SECONDS, check_proof, run_proofs

PROMISES: dict[str, dict[str, str]] = {
    "stages": {
        "`Pipeline(net, micro_size, stage_config)`, `PipelineCell`": "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
        "`cell.pipeline_stage = i`": "tests/parallel/pipeline/test_split.py::test_the_users_map",
    },
    "schedules": {
        '`scheduler="gpipe"`, `"1f1b"`': "tests/parallel/pipeline/test_schedules_on_ranks.py::"
        "test_every_schedule_equals_one_process",
        "`interleave=True`, `pipeline_segment`": "tests/parallel/pipeline/test_schedules_on_ranks.py::"
        "test_every_schedule_equals_one_process",
        '`scheduler="zero_bubble_v"`': "tests/parallel/pipeline/test_schedules.py::"
        "test_names_of_mindspore",
        '`scheduler="seqpipe"`, `seq_split_num`': "tests/parallel/pipeline/test_sequence_slices.py::"
        "test_every_schedule_equals_one_process",
        '`scheduler="seqvpp"`, `"seqsmartvpp"`': "tests/parallel/pipeline/test_sequence_slices.py::"
        "test_every_schedule_equals_one_process",
    },
    "shared_parameters": {
        "shared parameters, `sync_pipeline_shared_parameters`": "tests/parallel/pipeline/test_known_faults.py::"
        "test_tied_weights_stay_equal_bit_by_bit",
        "`PipelineGradReducer`": "tests/parallel/mindspore/test_page.py::"
        "test_the_examples_have_the_loss_of_one_process",
    },
    "inference": {
        "`PipelineCellInference`": "tests/parallel/pipeline/test_schedules_on_ranks.py::"
        "test_evaluation",
        "`output_broadcast`, `pipeline_result_broadcast`": "tests/parallel/evaluation/test_evaluation.py::"
        "test_sums_and_outputs_are_those_of_one_process",
    },
}


@pytest.mark.parametrize("promise", PROMISES["stages"])
def test_stages(promise: str) -> None:
    check_proof(PROMISES["stages"][promise])


@pytest.mark.parametrize("promise", PROMISES["schedules"])
def test_schedules(promise: str) -> None:
    check_proof(PROMISES["schedules"][promise])


@pytest.mark.parametrize("promise", PROMISES["shared_parameters"])
def test_shared_parameters(promise: str) -> None:
    check_proof(PROMISES["shared_parameters"][promise])


@pytest.mark.parametrize("promise", PROMISES["inference"])
def test_inference(promise: str) -> None:
    check_proof(PROMISES["inference"][promise])


@pytest.mark.thorough
@pytest.mark.timeout(PROOF_SECONDS)
def test_the_proofs_of_this_page_pass() -> None:
    run_proofs(PROMISES)
