"""
horovodrun.

Checked against horovod 0.28 (runner/launch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.mpi import SCRIPT_NOTE, add_hosts
from pdrun.launcher.translate.option_table import (
    UnreadableOptionError,
    parse_table,
    read_command,
)

HOROVOD_TABLE = """
-np --num-proc N
-H --hosts HOSTS
-hostfile --hostfile FILE
-p --ssh-port PORT
-i --ssh-identity-file FILE
--start-timeout S
--network-interfaces NAMES
--network-interface NAMES
--output-filename DIR
--verbose
--disable-cache
--gloo
--mpi
--jsrun
--tcp
--mpi-args TEXT
--binding-args TEXT
--config-file FILE
--log-level LEVEL
--log-with-timestamp
--log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp
--log-hide-timestamp
--no-log-hide-timestamp
--fusion-threshold-mb N
--cycle-time-ms N
--cache-capacity N
--hierarchical-allreduce
--no-hierarchical-allreduce
--hierarchical-allgather
--no-hierarchical-allgather
--torus-allreduce
--no-torus-allreduce
--autotune
--no-autotune
--autotune-log-file FILE
--autotune-warmup-samples N
--autotune-steps-per-sample N
--autotune-bayes-opt-max-samples N
--autotune-gaussian-process-noise N
--timeline-filename FILE
--timeline-mark-cycles
--no-timeline-mark-cycles
--stall-check
--no-stall-check
--stall-check-warning-time-seconds S
--stall-check-shutdown-time-seconds S
--mpi-threads-disable
--no-mpi-threads-disable
--num-nccl-streams N
--thread-affinity CPUS
--gloo-timeout-seconds S
--min-np --min-num-proc N
--max-np --max-num-proc N
--slots-per-host N
--elastic-timeout S
--reset-limit N
--blacklist-cooldown-range S S
--host-discovery-script FILE
-v --version
-cb --check-build
"""
_OF_HOROVODS_LIBRARY = (
    "cycle_time_ms",
    "cache_capacity",
    *("hierarchical_allreduce", "no_hierarchical_allreduce"),
    *("hierarchical_allgather", "no_hierarchical_allgather"),
    *("torus_allreduce", "no_torus_allreduce", "autotune", "no_autotune", "autotune_log_file"),
    *("autotune_warmup_samples", "autotune_steps_per_sample"),
    *("autotune_bayes_opt_max_samples", "autotune_gaussian_process_noise"),
    *("timeline_mark_cycles", "no_timeline_mark_cycles"),
    *("mpi_threads_disable", "no_mpi_threads_disable", "num_nccl_streams", "thread_affinity"),
)
_HINTS = {
    **dict.fromkeys(("version", "check_build"), "it asks horovodrun itself and starts nothing"),
    **dict.fromkeys(
        ("config_file", "host_discovery_script", "mpi_args", "binding_args", "jsrun"),
        "keep horovodrun for it",
    ),
    **dict.fromkeys(
        ("min_num_proc", "max_num_proc", "slots_per_host"),
        "it belongs to an elastic job: use pdrun --nodes MIN:MAX --devices N",
    ),
    "elastic_timeout": "use pdrun --nodes MIN:MAX --start-timeout S",
    "reset_limit": "use pdrun --nodes MIN:MAX --max-restarts N",
    "fusion_threshold_mb": (
        "it sets horovod's library, which pdrun does not start; use bucket_cap_mb of"
        " DistributedDataParallel"
    ),
    **dict.fromkeys(
        _OF_HOROVODS_LIBRARY,
        "it sets horovod's library, which pdrun does not start; leave it out",
    ),
    **dict.fromkeys(
        ("stall_check_warning_time_seconds", "stall_check_shutdown_time_seconds"),
        "use pdrun --hang-timeout S",
    ),
    **dict.fromkeys(
        ("stall_check", "no_stall_check"),
        "pdrun reports hangs by itself (--hang-timeout); leave it out",
    ),
    "gloo_timeout_seconds": "use timeout= of torch.distributed.init_process_group",
    "blacklist_cooldown_range": (
        "it belongs to an elastic job: use pdrun --nodes MIN:MAX --devices N"
    ),
    "timeline_filename": (
        "it sets horovod's library, which pdrun does not start; use torch.profiler"
    ),
    "prefix_output_with_timestamp": "pdrun writes no times in front of lines; leave it out",
}
"""Options without a translation, and what to use."""
_LEFT_OUT = {
    **dict.fromkeys(("gloo", "mpi", "tcp"), "torch.distributed chooses its own transport"),
    "disable_cache": "pdrun checks ssh at every start",
    "verbose": "it concerns the messages of the launcher",
    **dict.fromkeys(
        (
            *("log_level", "log_with_timestamp", "log_without_timestamp"),
            *("log_hide_timestamp", "no_log_hide_timestamp"),
        ),
        "it sets the messages of horovod, which pdrun does not start",
    ),
}
"""Options without an effect under pdrun, and why."""


def translate_horovodrun(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``horovodrun WORDS``."""
    command = read_command("horovodrun", parse_table(HOROVOD_TABLE), words)
    result = Translation("horovodrun")
    command.refuse(_HINTS)
    total = command.count_of("num_proc")
    if not total:
        raise UnreadableOptionError("-np is required", where="horovodrun")
    add_hosts(command, result, total, 0)
    ssh_options = []
    if port := command.text_of("ssh_port"):
        ssh_options.append(f"-p {port}")
    if path := command.text_of("ssh_identity_file"):
        ssh_options.append(f"-i {path}")
    if ssh_options:
        result.add("--ssh-opts", " ".join(ssh_options))
    if seconds := command.text_of("start_timeout"):
        result.add("--start-timeout", f"{seconds}s")
    names = command.text_of("network_interfaces", command.text_of("network_interface"))
    if "," in names:
        raise command.make_error("network_interfaces", "several interfaces are not supported")
    if names:
        result.add("--interface", names)
    if folder := command.text_of("output_filename"):
        result.add("--log-dir", folder)
    result.set_command(command.words)
    result.notes.append(SCRIPT_NOTE)
    result.left_out = command.list_left_out(_LEFT_OUT)
    return result
