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
--fusion-threshold-mb N
--cycle-time-ms N
--cache-capacity N
--autotune
--timeline-filename FILE
--min-np --min-num-proc N
--max-np --max-num-proc N
--slots-per-host N
--elastic-timeout S
--reset-limit N
--host-discovery-script FILE
"""
_HINTS = {
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
        ("cycle_time_ms", "cache_capacity", "autotune"),
        "it sets horovod's library, which pdrun does not start; leave it out",
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
        ("log_level", "log_with_timestamp", "log_without_timestamp"),
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
