"""
accelerate launch: number of workers, where they meet, and the variables that `Accelerator` reads.

Checked against accelerate 1.15 (commands/launch.py, utils/launch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common.files import path_exists, read_text
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.translate.accelerate_variables import (
    DEEPSPEED_VARIABLES,
    DYNAMO_VARIABLES,
    FSDP_VARIABLES,
    add_variables,
)
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import (
    ForeignCommand,
    ForeignOption,
    UsedOption,
    choice_of,
    parse_table,
    read_command,
)
from pdrun.launcher.translate.torchrun import (
    MASTER_PORT,
    add_meeting,
    add_shared_options,
)

_FLAGS = """
    quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic debug
    dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm
    same_network module no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16
"""
_VALUES = """
    config_file mixed_precision num_processes num_machines num_cpu_threads_per_process
    dynamo_backend dynamo_mode gpu_ids machine_rank main_process_ip main_process_port tee log_dir
    role rdzv_backend rdzv_conf max_restarts monitor_interval vm env main_training_function
    deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
    offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps
    gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile
    deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher
    deepspeed_moe_layer_cls_names fsdp_version fsdp_offload_params fsdp_min_num_params
    fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_auto_wrap_policy
    fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type
    fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
    fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload
    aws_access_key_id aws_secret_access_key mpirun_hostfile
"""
_SHORT_NAMES = {"quiet": "-q", "module": "-m", "tee": "-t"}
MAX_FILE_BYTES = 1 << 18
"""Size limit of a configuration file."""

_OTHER_FAMILIES = ("megatron_lm_", "parallelism_config_", "fp8_")
"""Beginnings of the options of parts of accelerate that start processes in their own way."""
_UNSUPPORTED = (
    *("use_megatron_lm", "use_parallelism_config", "tpu", "tpu_cluster", "vm", "env"),
    *("aws_access_key_id", "aws_secret_access_key", "mpirun_hostfile", "deepspeed_hostfile"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "offload_optimizer_nvme_path"),
    *("offload_param_nvme_path",),
)
_HINTS = dict.fromkeys(_UNSUPPORTED, "keep accelerate launch for it")
_LEFT_OUT = {
    "quiet": "it concerns the messages of the launcher",
    "same_network": "the nodes connect to one address in any network",
    **dict.fromkeys(
        ("tpu_use_sudo", "no_tpu_cluster", "downcast_bf16", "main_training_function"),
        "it concerns TPUs only",
    ),
    **dict.fromkeys(
        (key for key, _, _ in FSDP_VARIABLES), "accelerate reads it with --use_fsdp only"
    ),
    **dict.fromkeys(
        ("deepspeed_multinode_launcher", *(key for key, _, _ in DEEPSPEED_VARIABLES)),
        "accelerate reads it with --use_deepspeed only",
    ),
    **dict.fromkeys(
        (key for key, _, _ in DYNAMO_VARIABLES), "accelerate reads it with --dynamo_backend only"
    ),
}
"""Options without an effect under pdrun, and why."""
_STANDARD_LAUNCHER = "standard"
"""Value of --deepspeed_multinode_launcher with which every machine runs the same command."""
_SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}
"""Sections of a configuration file, and what their keys begin with on the command line."""
_FROM_FILE = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("gpu_ids", "debug", "enable_cpu_affinity", "mixed_precision"),
)


def accelerate_table() -> tuple[ForeignOption, ...]:
    """Return the options of accelerate launch: each with dashes or underscores."""
    lines = []
    for text, value in ((_FLAGS, ""), (_VALUES, " V")):
        for key in text.split():
            names = {f"--{key}": None, f"--{key.replace('_', '-')}": None}
            lines.append(" ".join([*names, _SHORT_NAMES.get(key, "")]) + value)
    return parse_table("\n".join(lines))


def translate_accelerate(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``accelerate launch WORDS``."""
    command = read_command(
        "accelerate launch",
        accelerate_table(),
        words,
        abbreviates=False,
        refused_prefixes=_OTHER_FAMILIES,
    )
    result = Translation("accelerate launch")
    kind, command = _read_config(command, environ, result)
    command.refuse(_HINTS)
    _add_workers(command, kind, result)
    _check_deepspeed_launcher(command, kind, result)
    add_variables(command, kind, result)
    result.set_program(
        command.words, is_module=command.has("module"), is_command=command.has("no_python")
    )
    result.left_out = command.list_left_out(_LEFT_OUT)
    return result


def _check_deepspeed_launcher(command: ForeignCommand, kind: str, result: Translation) -> None:
    """Check who starts the other machines: accelerate itself does not."""
    key = "deepspeed_multinode_launcher"
    if kind != "deepspeed":
        return
    launcher = command.text_of(key)
    if command.count_of("num_machines", 1) == 1:
        return
    if not launcher:
        result.notes.append(
            "accelerate starts the other machines with pdsh; run pdrun's line on every machine"
            f" (as with --{key} {_STANDARD_LAUNCHER})"
        )
    elif launcher.lower() != _STANDARD_LAUNCHER:
        raise command.make_error(
            key,
            f"{quote_text(launcher)} is not translated: it starts the other machines",
            f"use {_STANDARD_LAUNCHER} and run the line on every machine, or pdrun --hosts",
        )


def _read_config(
    command: ForeignCommand, environ: Mapping[str, str], result: Translation
) -> tuple[str, ForeignCommand]:
    """
    Return the way of training, and the command with the values of a configuration file added.

    The ways are ``multi``, ``fsdp``, ``deepspeed`` and ``single``; empty: the number of workers
    decides.
    """
    flags = (("multi_gpu", "multi"), ("use_fsdp", "fsdp"), ("use_deepspeed", "deepspeed"))
    chosen = [way for key, way in flags if command.has(key)]
    if len(chosen) + command.has("cpu") > 1:
        raise UsageError(
            "use only one of --cpu, --multi_gpu, --use_deepspeed and --use_fsdp",
            where="accelerate launch",
        )
    kind = chosen[0] if chosen else "single" if command.has("cpu") else ""
    path = command.text_of("config_file")
    if not path:
        path = _default_config_path(environ)
        if command.has("cpu") or not path_exists(path):
            return kind, command
        result.notes.append(f"with the values of {path}, accelerate's default configuration")
    data = _load_config(path)
    if not kind:
        kind = _kind_of_file(data, path)
    return kind, replace(command, options=(*_options_of_file(data, path), *command.options))


def _default_config_path(environ: Mapping[str, str]) -> str:
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = environ.get("HF_HOME", f"{cache}/huggingface")
    if home.startswith("~/"):
        home = environ.get("HOME", "") + home[1:]
    return f"{home}/accelerate/default_config.yaml"


def _load_config(path: str) -> Mapping[str, Any]:
    import yaml

    text = read_text(path, MAX_FILE_BYTES)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}", where=path) from None
    if not isinstance(data, dict):
        raise ConfigError("is not a configuration of accelerate", where=path)
    if data.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError("describes SageMaker, which is not translated", where=path)
    if data.get("parallelism_config"):
        raise ConfigError(
            "parallelism_config is not translated", where=path, hint="keep accelerate launch for it"
        )
    return data


def _kind_of_file(data: Mapping[str, Any], path: str) -> str:
    text = str(data.get("distributed_type", "NO")).rpartition(".")[2].upper()
    if text == "NO" or data.get("use_cpu") in (True, "true"):
        return "single"
    if text in ("FSDP", "DEEPSPEED"):
        return text.lower()
    if text.startswith("MULTI_") and text != "MULTI_CPU":
        return "multi"
    raise ConfigError(f"distributed_type {text} is not translated", where=path)


def _options_of_file(data: Mapping[str, Any], path: str) -> list[UsedOption]:
    """Return the values of a file as options, before those of the command line."""
    found = {key: data[key] for key in _FROM_FILE if data.get(key) is not None}
    for section, prefix in _SECTIONS.items():
        values = data.get(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            if not key.startswith(prefix):
                key = prefix + key
            found[key] = value
    options: list[UsedOption] = []
    for key, value in found.items():
        is_flag = key in _FLAGS.split()
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        if not is_flag or text == "true":
            options.append(UsedOption(key, f"{key} of {path}", () if is_flag else (text,)))
    deepspeed = data.get("deepspeed_config")
    if isinstance(deepspeed, dict) and deepspeed:
        options.append(UsedOption("config_ds_fields", "", (",".join(deepspeed).lower(),)))
    return options


def _add_workers(command: ForeignCommand, kind: str, result: Translation) -> None:
    """Add nodes, workers per node and where they meet."""
    machines = command.count_of("num_machines", 1)
    total = command.count_of("num_processes", 0)
    if kind == "single" and total > 1:
        backend = " --backend cpu" if command.has("cpu") else ""
        raise command.make_error(
            "num_processes",
            f"accelerate starts one process here, not {total}: it needs --multi_gpu",
            f"for {total} workers: pdrun --devices {total}{backend}",
        )
    if kind == "single":
        total = 1
    if machines > 1 and total % machines:
        raise command.make_error(
            "num_processes", f"{total} processes cannot be divided over {machines} machines"
        )
    if machines > 1 and not total:
        raise command.make_error("num_processes", "--num_processes is required")
    result.add("--nodes", str(machines))
    result.add("--devices", str(total // machines) if total else "auto")
    host = command.text_of("main_process_ip")
    port = command.text_of("main_process_port")
    rank = command.text_of("machine_rank")
    backend = command.parse("rdzv_backend", choice_of("static", "c10d"), "static")
    if machines > 1:
        if not host:
            raise command.make_error("num_machines", "--main_process_ip is required")
        if rank:
            result.add("--node-rank", rank)
    if machines == 1 or backend == "static":
        add_meeting(result, str(machines), is_static=True, host=host, port=port)
    else:
        endpoint = f"{host}:{port or MASTER_PORT}"
        add_meeting(result, str(machines), is_static=False, endpoint=endpoint)
    add_shared_options(command, result)
    if threads := command.count_of("num_cpu_threads_per_process"):
        result.add("--threads", str(threads))
    if command.has("cpu"):
        result.add("--backend", "cpu")
    devices = command.text_of("gpu_ids", "all")
    if devices != "all":
        result.environment["CUDA_VISIBLE_DEVICES"] = devices
