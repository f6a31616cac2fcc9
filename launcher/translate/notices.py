"""What a user of torchrun may not expect of a line that pdrun accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS

MAX_SCRIPT_BYTES = 1 << 20
"""How much of a script is searched for its options."""
UNMISTAKABLE_NAMES = frozenset(
    (
        *("--nodes", "--devices", "--scheduler", "--hosts", "--hostfile", "--rank-table"),
        *("--node-rank", "--node_rank", "--node-name", "--max-restarts", "--max_restarts"),
        *("--restart-on", "--no-restart-on", "--restart-window", "--spares", "--start-timeout"),
        *("--hang-timeout", "--time-limit", "--on-scheduler-loss", "--show-ranks"),
        *("--show-stderr", "--no-files", "--no-warm", "--dry-run", "--explain", "--insecure"),
        *("--token-file", "--nnodes", "--nproc-per-node", "--nproc_per_node", "--master-addr"),
        *("--master_addr", "--master-port", "--master_port", "--rdzv-endpoint"),
        *("--rdzv_endpoint", "--rdzv-id", "--rdzv_id", "--rdzv-backend", "--rdzv_backend"),
        *("--rdzv-conf", "--rdzv_conf", "--standalone", "--worker_num", "--local_worker_num"),
        *("--cluster_time_out", "--tail_worker_log"),
    )
)
"""Options that hardly any script has."""


def find_misplaced_options(words: Sequence[str]) -> Iterator[str]:
    """
    Yield a warning for each option of pdrun behind a script that does not mention it.

    Args:
        words: the script and its arguments.
    """
    names = []
    for word in words[1:]:
        if word == "--":
            break
        names.append(word.partition("=")[0])
    suspects = [name for name in names if name in UNMISTAKABLE_NAMES]
    if not suspects:
        return
    try:
        with Path(words[0]).open("rb") as file:
            text = file.read(MAX_SCRIPT_BYTES).replace(b"-", b"_")
    except (OSError, ValueError):
        return
    for name in dict.fromkeys(suspects):
        if name.strip("-").replace("-", "_").encode() not in text:
            script = quote_text(words[0])
            yield f"{name} behind {script} is an argument of the script; for pdrun write it before"


def find_macros(resolved: ResolvedSpec) -> Iterator[str]:
    """Yield a warning for arguments that torchrun would change, on a line with its options."""
    suspects = [word for word in resolved.spec.program.args if "$" in word]
    if not suspects or not _uses_torchrun(resolved):
        return
    from pdrun.launcher.translate.torchrun import LOCAL_RANK_MACRO

    for word in suspects:
        if "$$" in word or LOCAL_RANK_MACRO.search(word):
            yield (
                f"{quote_text(word)} is passed as typed; torchrun replaces $local_rank and $$"
                " (pdrun: --local-rank-arg NAME)"
            )


def _uses_torchrun(resolved: ResolvedSpec) -> bool:
    """Return whether an option of torchrun decides about nodes, workers, address or job."""
    theirs = {name for row in TORCHRUN_OPTIONS for name in row.names}
    paths = ("resources.nodes", "resources.devices", "place.store", "job")
    return not theirs.isdisjoint(resolved.sources.get(path, "") for path in paths)


def compare_default_workers(resolved: ResolvedSpec, workers: int) -> Iterator[str]:
    """Yield a warning if options of torchrun start several workers where torchrun starts one."""
    is_default = resolved.sources.get("resources.devices") == "default"
    if workers > 1 and is_default and _uses_torchrun(resolved):
        yield (
            f"{workers} workers on this node, one per device;"
            " torchrun starts one without --nproc-per-node"
        )
