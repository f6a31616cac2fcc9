"""Which test proves each row of docs/mindspore.md, by page and first cell."""

from __future__ import annotations

EXAMPLE = "tests/parallel/mindspore/test_page.py::test_the_examples_have_the_loss_of_one_process"
INIT = "tests/parallel/startup/test_init.py"
TABLE = "tests/parallel/startup/test_rank_table.py"
DYNAMIC = "tests/rendezvous/clients/test_dynamic.py"
LOADER = "tests/parallel/data/test_loader.py"
INPUTS = "tests/parallel/operators/test_input_layouts.py"
OPTIMIZER = "tests/parallel/zero/test_optimizer_options.py"
OPERATORS = "tests/parallel/operators/test_operators.py"
PARTS = "tests/parallel/operators/test_interleaved.py"
FINER = "tests/parallel/operators/test_finer_mesh.py"
MATRIX = "tests/parallel/layouts/test_device_matrix.py"
SPLIT = "tests/parallel/pipeline/test_split.py"
SCHEDULES = "tests/parallel/pipeline/test_schedules_on_ranks.py"
SLICES = "tests/parallel/pipeline/test_sequence_slices.py"
HIGH = "tests/parallel/operators/test_matmul_grid.py"
LEVELS = "tests/parallel/test_transparency.py"
AXES = "tests/parallel/test_model_axes.py"
AUTO = "tests/parallel/auto/test_auto_runs.py"
BY_HAND = "tests/parallel/collectives/test_collectives_by_hand.py"
SERVERS = "tests/parallel/servers/test_training.py"
MEMORY = "tests/parallel/zero/test_offload_and_memory.py"
TRANSFORM = "tests/parallel/checkpoint/test_transform.py"
PLACEMENT = "tests/parallel/layouts/test_placement.py"
SAVED = "tests/parallel/checkpoint/test_checkpoints.py"

PROOFS: dict[str, dict[str, str]] = {
    "Starting": {
        "`msrun`": "tests/launcher/translate/test_command_lines.py"
        "::test_options_of_torchrun_and_msrun_can_be_given_to_pdrun",
        "dynamic cluster (`MS_ROLE`, `MS_SCHED_HOST`, `MS_SCHED_PORT`, `MS_WORKER_NUM`,"
        " `MS_NODE_ID`)": f"{DYNAMIC}::test_asked_for_ranks_are_given_and_mindspores_names_work",
        "a process with `MS_ROLE=MS_SCHED`": f"{DYNAMIC}"
        "::test_pdrun_scheduler_serves_and_recovers_a_cluster_of_mindspores_variables",
        "rank table (`RANK_TABLE_FILE`, `RANK_ID`, `DEVICE_ID`)": f"{TABLE}"
        "::test_processes_of_a_table_form_one_world",
        "`mpirun`": "tests/e2e/clusters/test_mpirun.py"
        "::test_init_finds_the_other_ranks_on_one_host",
        "`init()`, `get_rank()`, `get_group_size()`": f"{INIT}::test_under_pdrun",
        "a script of MindSpore, with its own `init()`": "tests/parallel/mindspore/test_own_init.py"
        "::test_workers_and_scheduler_get_mindspores_variables",
    },
    "Data parallel": {
        '`parallel_mode="data_parallel"`': EXAMPLE,
        "`num_shards`, `shard_id`": f"{LOADER}::test_the_samples_do_not_depend_on_the_ranks",
        "`gradients_mean=True`": f"{OPTIMIZER}::test_micro_batches_can_be_added_up",
        "`parameter_broadcast=True`": "tests/parallel/checkpoint/test_resume_compatibility.py"
        "::test_all_ranks_start_with_rank_0s_buffers_of_any_type",
        "`layerwise_parallel` of a parameter": f"{AXES}"
        "::test_an_optimizer_with_state_and_groups_follows_its_weights",
        "`gradient_fp32_sync`, `enable_fp32_communication`": f"{AXES}::test_narrow_types",
    },
    "Operator-level parallel": {
        "`Primitive.shard(in_strategy)` with counts": f"{OPERATORS}"
        "::test_the_tutorial_network_has_one_sequence_of_losses",
        "`shard` with layouts": f"{OPERATORS}::test_layouts_are_accepted_in_every_form",
        "`out_strategy`": f"{FINER}::test_meshes_get_the_axes_that_layouts_need",
        "`Layout(device_matrix, alias_name)`": f"{MATRIX}::test_a_layout_by_names",
        "the alias `interleaved_parallel`": f"{PARTS}::test_parts_have_the_numbers_of_one_process",
        "`Layout(rank_list=...)`": f"{FINER}::test_meshes_get_the_axes_that_layouts_need",
        "strategies without a mesh": f"{FINER}::test_meshes_get_the_axes_that_layouts_need",
        "`Cell.shard`, `ms.parallel.shard(fn, ...)`": f"{OPERATORS}::test_layouts_inside_a_model",
        "`reshard(tensor, layout)`": f"{OPERATORS}::test_layouts_inside_a_model",
        "repeated calculation": f"{OPERATORS}::test_repeated_computation_changes_nothing",
        "`TensorRedistribution`": "tests/parallel/layouts/test_redistribute.py"
        "::test_random_layouts_against_dense_tensors",
        "operators without a strategy": f"{OPERATORS}::test_propagation_golden",
    },
    "Multi-copy parallel": {
        "`MicroBatchInterleaved`: copies of the batch": "tests/parallel/training"
        "/test_interleaved_copies.py::test_copies_compute_what_one_process_does",
        "`interleaved_parallel`: copies inside of a layer": f"{PARTS}"
        "::test_products_of_other_parts_are_computed_during_a_collective",
    },
    "High-dimension tensor parallel": {
        "`enable_nd_tp`, 2D": f"{HIGH}::test_the_bytes_of_the_formulas",
        "`enable_nd_tp`, 3D": f"{HIGH}::test_products_have_the_numbers_of_one_process",
    },
    "Optimizer parallel": {
        "`enable_parallel_optimizer`, `hsdp()`": EXAMPLE,
        '`optimizer_level="level1"`: state, gathered weights stay for the step': f"{MEMORY}"
        "::test_levels_take_less_and_less",
        '`optimizer_level="level2"`: and gradients': f"{MEMORY}::test_levels_take_less_and_less",
        '`optimizer_level="level3"`: and weights': f"{MEMORY}::test_levels_take_less_and_less",
        "`shard_size`, `optimizer_weight_shard_size`": f"{LEVELS}::test_sampled_product",
        "`threshold`, `parallel_optimizer_threshold` (64 KB)": f"{OPTIMIZER}"
        "::test_the_threshold_can_have_a_unit",
        "`Parameter.parallel_optimizer = False`": f"{OPTIMIZER}::test_a_weight_can_opt_out",
    },
    "Pipeline parallel": {
        "`Pipeline(net, micro_size, stage_config)`, `PipelineCell`": EXAMPLE,
        "`cell.pipeline_stage = i`": f"{SPLIT}::test_the_users_map",
        '`scheduler="gpipe"`, `"1f1b"`': f"{SCHEDULES}::test_every_schedule_equals_one_process",
        "`interleave=True`, `pipeline_segment`": f"{SCHEDULES}"
        "::test_every_schedule_equals_one_process",
        '`scheduler="zero_bubble_v"`': "tests/parallel/pipeline/test_schedules.py"
        "::test_names_of_mindspore",
        '`scheduler="seqpipe"`, `seq_split_num`': f"{SLICES}"
        "::test_every_schedule_equals_one_process",
        '`scheduler="seqvpp"`, `"seqsmartvpp"`': f"{SLICES}"
        "::test_every_schedule_equals_one_process",
        "shared parameters, `sync_pipeline_shared_parameters`": "tests/parallel/pipeline"
        "/test_known_faults.py::test_tied_weights_stay_equal_bit_by_bit",
        "`PipelineGradReducer`": EXAMPLE,
        "`PipelineCellInference`": f"{SCHEDULES}::test_evaluation",
        "`output_broadcast`, `pipeline_result_broadcast`": "tests/parallel/evaluation"
        "/test_evaluation.py::test_sums_and_outputs_are_those_of_one_process",
    },
    "Automatic parallel": {
        '`"recursive_programming"`': EXAMPLE,
        '`"sharding_propagation"`': f"{AUTO}::test_edited_plan_follows_by_propagation",
        '`"dynamic_programming"`': "tests/parallel/auto/test_exact_search.py"
        "::test_search_is_the_minimum_over_all_plans",
        "`auto_pipeline=True`": f"{AUTO}::test_auto_mesh_chooses_degrees_and_savers",
        "`save_operator_strategy_file`, `load_operator_strategy_file`,"
        " `set_op_strategy_config`": "tests/parallel/auto/test_mindspore_strategies.py"
        "::test_a_file_of_mindspore_runs_and_is_saved",
        "`SAPP` cost model, memory limit": "tests/parallel/auto/test_degrees.py"
        "::test_best_candidate_fits_and_is_the_fastest",
    },
    "Manual parallel": {
        "`AllReduce`, `AllGather`, `ReduceScatter`, `AlltoAll`, `Broadcast`, `Reduce`": f"{BY_HAND}"
        "::test_values_and_gradients_are_those_of_one_process",
        "`Send`, `Receive`, `NeighborExchange`": f"{BY_HAND}"
        "::test_values_and_gradients_are_those_of_one_process",
        "`create_group`": EXAMPLE,
    },
    "Parameter server": {
        "`set_param_ps()`": f"{SERVERS}::test_sync_with_sgd_has_the_bits_of_data_parallel",
        "`MS_ROLE=MS_PSERVER`, `MS_SERVER_NUM`": "tests/launcher/config/test_detected.py"
        "::test_servers_of_a_launcher_are_those_of_the_job",
        "`init_in_server`, `EmbeddingLookup`": f"{SERVERS}"
        "::test_served_embeddings_have_any_id_and_need_a_glob",
    },
    "Memory and speed": {
        "`GradAccumulation(net, micro_size)`": f"{OPTIMIZER}::test_micro_batches_can_be_added_up",
        "`MicroBatchInterleaved`": "tests/parallel/training/test_interleaved_copies.py"
        "::test_copies_compute_what_one_process_does",
        "`Cell.recompute()`": f"{LEVELS}::test_sampled_product",
        "`Primitive.recompute()`": "tests/parallel/operators/test_recomputed_operators.py"
        "::test_results_do_not_live_until_the_backward_pass",
        "`mp_comm_recompute=False`": "tests/parallel/model/test_kept_collectives.py"
        "::test_results_of_collectives_are_kept",
        "`recompute_slice_activation=True`": "tests/parallel/model/test_kept_collectives.py"
        "::test_inputs_are_kept_as_parts",
        "`Cell.offload`, `memory_offload`": f"{MEMORY}::test_activations_really_go",
        "optimizer on the host": f"{MEMORY}::test_offloading_changes_no_bit",
        '`Primitive.set_device("CPU")`: an operator or cell on the host': "tests/parallel/zero"
        "/test_host_modules.py::test_a_module_on_the_host_changes_no_bit",
        "`comm_fusion`, `set_comm_fusion(id)`": f"{OPTIMIZER}"
        "::test_modules_with_one_number_share_a_bucket",
    },
    "Dataset slicing": {
        '`dataset_strategy="data_parallel"`': f"{LOADER}"
        "::test_dataset_strategies_give_the_same_loss",
        '`dataset_strategy="full_batch"`, `full_batch=True`': f"{LOADER}"
        "::test_dataset_strategies_give_the_same_loss",
        "`dataset_strategy=((8, 1), (8,))`: rows": f"{LOADER}::test_counts_slice_rows_only",
        "`dataset_strategy=((1, 8), (1, 8))`: another dim": f"{INPUTS}"
        "::test_numbers_are_those_of_one_process",
        "`dataset_strategy` with layouts": f"{INPUTS}::test_numbers_are_those_of_one_process",
    },
    "Checkpoints": {
        "`save_checkpoint`, `load_checkpoint`": f"{SAVED}"
        "::test_saved_on_some_ranks_resumed_on_others",
        "`strategy_ckpt_config`, `save_param_strategy_file`": f"{TRANSFORM}"
        "::test_strategy_files_are_converted",
        "`transform_checkpoints`, `merge_sliced_parameter`": f"{TRANSFORM}"
        "::test_any_mesh_to_any_other",
        "`rank_list_for_transform`": f"{PLACEMENT}::test_the_list_of_ranks_is_enough_and_tight",
        "`merge_pipeline_strategys`": f"{PLACEMENT}::test_a_merged_file_of_a_pipeline",
        "`load_distributed_checkpoint`, `infer_predict_layout`": f"{SAVED}"
        "::test_saved_on_some_ranks_resumed_on_others",
        "`unified_safetensors`": f"{MEMORY}::test_export_and_import",
    },
    "Failures": {
        "`MS_ENABLE_RECOVERY`, `MS_RECOVERY_PATH`": f"{DYNAMIC}"
        "::test_recovery_of_mindspore_is_a_journal_in_its_folder",
        "`MS_ENABLE_RECOVERY`: a worker registers again with its `MS_NODE_ID`": f"{DYNAMIC}"
        "::test_a_lost_worker_comes_back_under_its_name",
        "disaster recovery: a worker is started again": "tests/e2e/test_examples.py"
        "::test_elastic_training_goes_on_where_it_stopped",
        "`MS_NODE_TIMEOUT`": "tests/chaos/test_silence.py::test_silence",
        "`ms-operator`: MSJob": "tests/launcher/k8s/test_manifests.py::test_manifests",
    },
}
"""``FILE::TEST``."""
