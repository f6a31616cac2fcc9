"""The variables that accelerate's library reads in the workers, from the launcher's options."""

from __future__ import annotations

from collections.abc import Sequence

from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import ForeignCommand, choice_of

FSDP_VARIABLES: Sequence[tuple[str, str, str]] = (
    ("fsdp_version", "FSDP_VERSION", "1"),
    ("fsdp_sharding_strategy", "FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    ("fsdp_reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", "true"),
    ("fsdp_offload_params", "FSDP_OFFLOAD_PARAMS", "false"),
    ("fsdp_min_num_params", "FSDP_MIN_NUM_PARAMS", "100000000"),
    ("fsdp_auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY", ""),
    ("fsdp_transformer_layer_cls_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP", ""),
    ("fsdp_backward_prefetch", "FSDP_BACKWARD_PREFETCH", ""),
    ("fsdp_state_dict_type", "FSDP_STATE_DICT_TYPE", ""),
    ("fsdp_forward_prefetch", "FSDP_FORWARD_PREFETCH", "false"),
    ("fsdp_use_orig_params", "FSDP_USE_ORIG_PARAMS", "true"),
    ("fsdp_cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    ("fsdp_sync_module_states", "FSDP_SYNC_MODULE_STATES", "true"),
    ("fsdp_activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING", "false"),
    ("fsdp_activation_checkpointing_offload", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
)
"""accelerate's key, the variable of its workers, and the default; empty: not set."""
_KEEPS_CASE = frozenset(
    (
        "fsdp_version",
        "fsdp_sharding_strategy",
        "fsdp_min_num_params",
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_backward_prefetch",
        "fsdp_state_dict_type",
    )
)
_LOWER_CASE = ("fsdp_", "offload_", "zero3_", "gradient_clipping")
DEEPSPEED_VARIABLES: Sequence[tuple[str, str, str]] = (
    ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", ""),
    ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ""),
    ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", ""),
    ("offload_optimizer_device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", ""),
    ("offload_param_device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", ""),
    ("zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT", ""),
    ("zero3_save_16bit_model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", ""),
    ("deepspeed_config_file", "ACCELERATE_DEEPSPEED_CONFIG_FILE", ""),
    ("deepspeed_moe_layer_cls_names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", ""),
)
DYNAMO_VARIABLES: Sequence[tuple[str, str, str]] = (
    ("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", ""),
    ("dynamo_mode", "ACCELERATE_DYNAMO_MODE", "default"),
    ("dynamo_use_fullgraph", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"),
    ("dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", "False"),
    ("dynamo_use_regional_compilation", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"),
)


def add_variables(command: ForeignCommand, kind: str, result: Translation) -> None:
    """Add the variables that accelerate's library reads in the workers."""
    found: dict[str, str] = {}
    precision = command.parse("mixed_precision", choice_of("no", "fp16", "bf16", "fp8"), "no")
    if precision == "fp8":
        raise command.make_error(
            "mixed_precision", "fp8 is not translated", "keep accelerate launch"
        )
    if precision != "no":
        found["ACCELERATE_MIXED_PRECISION"] = precision
    if command.has("cpu"):
        found["ACCELERATE_USE_CPU"] = "True"
    if command.has("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if command.has("enable_cpu_affinity"):
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    backend = command.text_of("dynamo_backend", "no")
    if backend.lower() != "no":
        found |= _variables_of(command, DYNAMO_VARIABLES)
        found["ACCELERATE_DYNAMO_BACKEND"] = backend.upper()
    if kind == "fsdp":
        found["ACCELERATE_USE_FSDP"] = "true"
        found |= _variables_of(command, FSDP_VARIABLES)
    if kind == "deepspeed":
        found["ACCELERATE_USE_DEEPSPEED"] = "true"
        if fields := command.text_of("config_ds_fields"):
            used = command.last_use("mixed_precision")
            is_from_file = used is not None and not used.name.startswith("-")
            found["ACCELERATE_CONFIG_DS_FIELDS"] = fields + ",mixed_precision" * is_from_file
        found |= _variables_of(command, DEEPSPEED_VARIABLES)
    for name, value in found.items():
        result.add("--env", f"{name}={value}")


def _variables_of(command: ForeignCommand, rows: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    found = {}
    for key, name, default in rows:
        used = command.last_use(key)
        value = default
        if used is not None:
            value = used.values[0] if used.values else "True"
        if key.startswith(_LOWER_CASE) and key not in _KEEPS_CASE:
            value = value.lower()
        if value:
            found[name] = value
    return found
