"""
``pdrun doctor``: what on this machine, and between nodes, would break or slow down a job.

    pdrun doctor                            this machine
    pdrun doctor --hosts node0,node1        these, and between them; or other options of run
    pdrun doctor --calibrate                measure the topology for pdrun plan
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import click

from pdrun.errors import UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.doctor.finding import (
    Finding,
    choose_exit_code,
    encode_findings,
    format_findings,
)
from pdrun.text import quote_command

CPU_DEVICES = 2
"""Processes that stand for devices on a machine without accelerators."""
CALIBRATION_MODULE = "pdrun.parallel.auto.calibrate"
NODE_MODULE = "pdrun.parallel.startup.node_check"
NODE_MARK = "pdrun-doctor:"
NODE_SECONDS = 60.0
"""Longest time of the job that checks nodes."""
START_TIMEOUT = "30s"
MAX_REASON_LINES = 6


def doctor_command() -> click.Command:
    """Return ``pdrun doctor``."""

    def doctor(
        calibrate: bool,
        devices: int | None,
        save: str,
        name: str,
        words: tuple[str, ...],
        **more: Any,
    ) -> int:
        if calibrate:
            return run_calibration(devices, save, name, words)
        if devices is not None or save:
            raise UsageError("requires --calibrate", where="--devices" if devices else "--save")
        return diagnose(words, **more)

    return click.Command(
        "doctor",
        callback=doctor,
        help=(
            "Check this machine for what would break or slow down a job. With options of"
            " pdrun run that start nodes (--hosts, --hostfile, --nodes 2 --scheduler, --launcher"
            " ...), check these nodes and what is between them. Exit code: 0, 78 after a failure."
        ),
        params=[
            click.Option(["--json"], is_flag=True, help="Print one JSON object."),
            click.Option(
                ["--only"],
                metavar="NAMES",
                default="",
                help="Checks: disk,ports,...",
                shell_complete=_complete_checks,
            ),
            click.Option(["--strict"], is_flag=True, help="Exit code 1 after a warning."),
            click.Option(
                ["--files"], metavar="FILES", default="", help="Must be equal on all nodes."
            ),
            click.Option(
                ["--log-dir"],
                metavar="DIR",
                default="",
                help="Folder of a job's logs; default: ./pdrun-logs.",
            ),
            click.Option(["--here"], is_flag=True, hidden=True),
            click.Option(["--calibrate"], is_flag=True, help="Measure a topology instead."),
            click.Option(
                ["--devices"], type=click.IntRange(1), help="To calibrate; default: all, or 2 CPUs."
            ),
            click.Option(["--save"], metavar="FILE", default="", help="Write the topology."),
            click.Option(["--name"], default="measured", help="Name of the topology."),
            click.Argument(["words"], metavar="[OPTIONS OF RUN]", nargs=-1, type=click.UNPROCESSED),
        ],
        context_settings={**CONTEXT_SETTINGS, "ignore_unknown_options": True},
    )


def _complete_checks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from pdrun.launcher.doctor.runner import CHECKS, NODE_CHECKS

    before, comma, last = incomplete.rpartition(",")
    names = (*CHECKS, *NODE_CHECKS)
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def diagnose(
    words: Sequence[str],
    *,
    json: bool,
    only: str,
    strict: bool,
    files: str,
    log_dir: str,
    here: bool,
) -> int:
    """Check this machine or nodes, print the findings, and return the exit code."""
    from pdrun.launcher.doctor import runner

    names = runner.parse_check_names(only)
    begin = time.monotonic()
    if (words or files) and not here:
        found = check_nodes(words, files, log_dir)
        if found is None:
            return 0
        found = [one for one in found if not names or one.check in names]
    else:
        folder = {"PDRUN_LOG_DIR": log_dir} if log_dir else {}
        found = runner.run_checks(runner.make_environment({**os.environ, **folder}), names)
    seconds = time.monotonic() - begin
    if json:
        click.echo(encode_findings(found, seconds))
    else:
        click.echo("\n".join(format_findings(found, seconds)))
    sys.stdout.flush()
    return choose_exit_code(found, is_strict=strict)


def check_nodes(words: Sequence[str], files: str, log_dir: str = "") -> list[Finding] | None:
    """
    Return what the nodes of a job have found, each itself and between each other.

    None: this node is not the first one of the job, which has the findings.

    Args:
        words: options of ``pdrun run`` that start the nodes.
        files: paths that must be equal on all nodes, separated by commas.
        log_dir: folder of logs whose disk each node checks; empty: the usual one.
    """
    command = [sys.executable, "-m", "pdrun", "run", "--no-files", "--prefix", "none"]
    command += ["--show-ranks", "0", "--screen", "none", "--devices", "1", "--backend", "cpu"]
    if not any(word.startswith("--start-timeout") for word in words):
        command += ["--start-timeout", START_TIMEOUT]
    command += [*words, "-m", NODE_MODULE, *(["--files", files] if files else [])]
    command += ["--log-dir", log_dir] if log_dir else []
    # files, not pipes: a process that keeps one open must not keep this one waiting
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _run_bounded(command, out, err)
        out.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines()
        err.seek(0)
        messages = err.read().decode("utf-8", "replace").splitlines()
    text = next((line[len(NODE_MARK) :] for line in lines if line.startswith(NODE_MARK)), "")
    if text and (found := _judge_text(text)) is not None:
        return found
    if code == 0:
        return None
    reason = " / ".join(line.removeprefix("pdrun: ") for line in messages[-MAX_REASON_LINES:])
    if code is None:
        what = f"the nodes did not answer in {NODE_SECONDS:.0f} s"
    else:
        what = f"the nodes could not start (exit code {code})"
    start = quote_command("pdrun", *words, "--no-python", "hostname")
    hint = f"the same start with a command shows more: {start}"
    return [Finding("job", "fail", f"{what}: {reason}" if reason else what, hint=hint)]


def _run_bounded(command: Sequence[str], out: IO[bytes], err: IO[bytes]) -> int | None:
    """Run a job and return its exit code; None: it was stopped because it took too long."""
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    try:
        return job.wait(NODE_SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()
        try:
            job.wait(10.0)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        return None
    except BaseException:
        job.terminate()
        job.wait()
        raise


def _judge_text(text: str) -> list[Finding] | None:
    from pdrun.launcher.doctor.node_checks import judge_nodes

    try:
        return judge_nodes(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


# ---- pdrun doctor --calibrate -----------------------------------------------


def has_accelerator() -> bool:
    """Return whether a job here would use accelerators."""
    from pdrun.backends.detect import choose_backend, probe_all

    return choose_backend("auto", probe_all(os.environ))[0].name != "cpu"


def run_calibration(devices: int | None, save: str, name: str, words: Sequence[str] = ()) -> int:
    """Run the measurement as a job and return its exit code."""
    if devices is None and not has_accelerator():
        devices = CPU_DEVICES
    command = [sys.executable, "-m", "pdrun", "run", "--no-files", "--show-ranks", "0"]
    if devices is not None:
        command += ["--devices", str(devices)]
    command += [*words, "-m", CALIBRATION_MODULE, "--name", name]
    if save:
        command += ["--save", str(Path(save))]
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else 128 - code
