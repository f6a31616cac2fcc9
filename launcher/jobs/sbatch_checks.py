"""
What would fail in Slurm's queue, found before the job is submitted: sizes that contradict each
other, a script or an output folder that does not exist, hosts outside of the allocation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pdrun.errors import PdrunError, UsageError
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.config.spec import JobSpec, Sources, source_of
from pdrun.launcher.jobs.sbatch import SIGNAL_MARGIN_SECONDS, BatchJob
from pdrun.launcher.plan.program import check_program

MAX_SIGNAL_SECONDS = 65535
"""Largest time of sbatch's --signal."""


def check_sizes(batch: BatchJob, spec: JobSpec, sources: Sources) -> None:
    """
    Refuse a command line of pdrun that the allocation cannot run.

    Raises:
        UsageError: it names hosts, more nodes or more devices than Slurm is asked for, or a grace
            period that does not fit into the time limit.
    """
    if spec.place.hosts:
        raise UsageError(
            "Slurm chooses the hosts of the job",
            where=source_of(sources, "place.hosts", "--hosts"),
            hint="leave it out, or choose with --sbatch nodelist=HOSTS",
        )
    nodes = spec.resources.max_members
    if source_of(sources, "resources.nodes", "") and nodes > batch.nodes:
        raise UsageError(
            f"the job needs {nodes} nodes, but Slurm is asked for {batch.nodes}",
            where=source_of(sources, "resources.nodes", "--nodes"),
            hint=f"write --nodes {nodes} in front of pdrun's own options",
        )
    directives = dict(batch.directives)
    devices = spec.resources.devices
    gpus = _count_gpus(directives.get("gpus-per-node", ""))
    wanted = devices if isinstance(devices, int) and spec.resources.backend != "cpu" else 0
    if gpus is not None and wanted > gpus:
        raise UsageError(
            f"{devices} workers per node need as many accelerators, but Slurm is asked for {gpus}",
            where=source_of(sources, "resources.devices", "--devices"),
            hint=f"write --gpus-per-node {devices}",
        )
    _check_grace(batch, directives)


def _count_gpus(text: str) -> int | None:
    """Return the number of accelerators of ``8``, ``a100:4`` or ``a100:2,h100:2``."""
    counts = re.findall(r"(?:^|,)(?:[^,:]+:)?([0-9]+)(?=,|$)", text)
    return sum(map(int, counts)) if counts else None


def _check_grace(batch: BatchJob, directives: Mapping[str, str]) -> None:
    needed = round(batch.grace + SIGNAL_MARGIN_SECONDS)
    if needed > MAX_SIGNAL_SECONDS:
        raise UsageError(
            f"must be at most {MAX_SIGNAL_SECONDS - SIGNAL_MARGIN_SECONDS:g} s in a batch job",
            where="--grace",
        )
    limit = parse_time_limit(directives.get("time", ""))
    if limit and limit <= needed:
        raise UsageError(
            f"{directives['time']} is {limit} s, but SIGTERM is sent {needed} s before the end"
            f" (--grace {batch.grace:g} and {SIGNAL_MARGIN_SECONDS:g} s more)",
            where="--time",
            hint="write MINUTES, H:MM:SS or D-HH:MM:SS, or shorten --grace",
        )


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a time limit in Slurm's format; None: there is no limit."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    minutes, seconds = [*parts, 0][:2]
    return minutes * 60 + seconds


def find_missing_files(batch: BatchJob, spec: JobSpec) -> PdrunError | None:
    """
    Return what does not exist on this machine but will be needed by the job: the script, or the
    folder of the output. Slurm discards the output of a job without its folder.
    """
    directives = dict(batch.directives)
    folder = Path.cwd() / directives.get("chdir", "")
    for key in ("output", "error"):
        parent = _fixed_folder(directives.get(key, ""))
        if parent and not Path(folder, parent).is_dir():
            return UsageError(
                f"the folder {quote_text(parent)} does not exist: Slurm discards the job's output",
                where=f"--{key}" if key == "output" else f"--sbatch {key}",
                hint="create it",
            )
    changes_folder = any(re.search(r"\b(cd|pushd)\b", line) for line in batch.setup)
    if spec.program.kind != "script" or changes_folder:
        return None
    found = check_program(spec.program, str(folder / spec.chdir), os.environ)
    if not found.error:
        return None
    error = UsageError(found.error)
    error.exit_code = found.exit_code or error.exit_code
    return error


def _fixed_folder(path: str) -> str:
    """Return the folder of an output file; empty: none is named, or its name has a pattern (%j)."""
    parent = path.rpartition("/")[0]
    return "" if "%" in parent else parent
