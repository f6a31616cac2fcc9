"""
Slurm batch jobs: the script that runs pdrun in an allocation; submit, query and cancel it.

    pdrun slurm render --nodes 2 --time 1:00:00 --devices 8 train.py      prints the script
    pdrun slurm submit ... / status JOB / cancel JOB                      sbatch, scontrol, scancel

A directive is one line of the script. Its value may contain only characters that neither end the
line nor begin a comment. The command of the body is quoted word by word. The script reaches sbatch
on stdin, never through a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdrun import process_setup
from pdrun.errors import ConfigError, RendezvousError, UsageError
from pdrun.launcher.common.parsers import quote_text

COMMAND_SECONDS = 60.0
SIGNAL_MARGIN_SECONDS = 15.0
"""Slurm sends SIGTERM this long, plus the grace period, before the end of the time limit."""
_VALUE_PATTERN = re.compile(r"[A-Za-z0-9_.,:+@%/=\[\]()*^&|!-]{1,512}")
_KEY_PATTERN = re.compile(r"[a-z][a-z0-9-]{1,40}")
_JOB_PATTERN = re.compile(r"[0-9]{1,12}(?:_[0-9]{1,9})?(?:\+[0-9]{1,4})?")
PDRUN_DIRECTIVES = (
    "ntasks-per-node",
    "ntasks",
    "signal",
    "requeue",
    "no-requeue",
    "open-mode",
    "wrap",
)
"""Directives that pdrun writes itself."""
OPTION_DIRECTIVES = {"nodes": "--nodes", "job-name": "--name"}
"""Directives that have an option of pdrun."""
USER_DIRECTIVES = ("uid", "gid")
"""Directives that would run the job as another user."""
_VALUE_FORMATS = {
    "time": (
        r"(?i:[0-9]+(?::[0-9]+){0,2}|[0-9]+-[0-9]+(?::[0-9]+){0,2}|infinite|unlimited)",
        "time limit",
        "write MINUTES, H:MM:SS, D-HH:MM:SS or UNLIMITED",
    ),
    "mem": (r"[0-9]+(?i:[kmgt]b?)?", "size", "write it as 64G"),
    "cpus-per-task": (r"[1-9][0-9]*", "number of CPUs", "write a number from 1 on"),
    "gpus-per-node": (
        r"(?:[A-Za-z][A-Za-z0-9_.-]*:)?[0-9]+(?:,(?:[A-Za-z][A-Za-z0-9_.-]*:)?[0-9]+)*",
        "number of accelerators",
        "write 8, or TYPE:8",
    ),
}
_VALUE_FORMATS["time-min"] = _VALUE_FORMATS["time"]


@dataclass(frozen=True)
class BatchJob:
    """A batch job for Slurm."""

    nodes: int = 1
    name: str = ""
    directives: tuple[tuple[str, str], ...] = ()
    """(key, value) of more ``#SBATCH --key=value`` lines, in order."""
    grace: float = 30.0
    """Seconds that the job needs to save its state, before the time limit ends it."""
    requeue: bool = True
    setup: tuple[str, ...] = field(default=())
    """Shell lines of the user before the command, unchanged: ``--setup 'module load cuda'``."""


def make_directive(key: str, value: str, where: str) -> tuple[str, str]:
    """
    Return a checked directive.

    Raises:
        UsageError: the key is unknown, the value contains white space, a quote, ``#``, ``$`` or a
            line end, or Slurm does not accept it as a time, a size or a number.
    """
    if not _KEY_PATTERN.fullmatch(key):
        raise UsageError(
            f"{quote_text(key)} is not an option of sbatch",
            where=where,
            hint="write KEY=VALUE, for example constraint=gpu",
        )
    if value and not _VALUE_PATTERN.fullmatch(value):
        raise UsageError(
            f"{quote_text(value)} is not allowed in a directive",
            where=where,
            hint="allowed are letters, digits and _ . , : + @ % / = [ ] ( ) * ^ & | ! -",
        )
    pattern, title, hint = _VALUE_FORMATS.get(key, ("", "", ""))
    if pattern and not re.fullmatch(pattern, value):
        raise UsageError(f"{quote_text(value)} is not a {title}", where=where, hint=hint)
    return key, value


def _check_directives(batch: BatchJob) -> None:
    """
    Refuse repeated directives, and those that the user may not give.

    sbatch accepts abbreviated names, so these are refused, too.
    """
    given: set[str] = set()
    reserved = (*PDRUN_DIRECTIVES, *OPTION_DIRECTIVES, *USER_DIRECTIVES)
    for key, _ in batch.directives:
        whole = key
        for name in reserved:
            if name.startswith(key):
                whole = name
                break
        if whole in USER_DIRECTIVES:
            raise UsageError(
                f"--{whole} would run the job as another user",
                where="--sbatch",
                hint="submit it as that user",
            )
        if whole in OPTION_DIRECTIVES:
            raise UsageError(
                f"{whole} has an option of pdrun",
                where="--sbatch",
                hint=f"use {OPTION_DIRECTIVES[whole]} instead",
            )
        if whole in PDRUN_DIRECTIVES:
            raise UsageError(
                f"--{whole} is written by pdrun itself", where="--sbatch", hint="leave it out"
            )
        if key in given:
            raise UsageError(
                f"--{key} is given twice", where="--sbatch", hint="leave one of them out"
            )
        given.add(key)


def render_script(batch: BatchJob, command: Sequence[str]) -> str:
    """
    Return the batch script.

    Args:
        batch: the job.
        command: the command of the body: pdrun and its arguments. They are quoted for the shell.

    Raises:
        UsageError: a directive is written by pdrun itself, is given twice or would run the job as
            another user, or a setup line contains a line end.
    """
    _check_directives(batch)
    if any("\n" in line for line in batch.setup):
        raise UsageError(
            "must not contain a line end", where="--setup", hint="give --setup once per line"
        )
    lines = ["#!/bin/bash"]
    if batch.name:
        lines.append(
            "#SBATCH --job-name={1}".format(*make_directive("job-name", batch.name, "--name"))
        )
    lines += [f"#SBATCH --nodes={batch.nodes}", "#SBATCH --ntasks-per-node=1"]
    for key, value in batch.directives:
        setting = f"{key}={value}" if value else key
        lines.append(f"#SBATCH --{setting}")
    requeue = "requeue" if batch.requeue else "no-requeue"
    lines += [
        "# SIGTERM this many seconds before the time limit: the workers save and exit.",
        f"#SBATCH --signal=TERM@{round(batch.grace + SIGNAL_MARGIN_SECONDS)}",
        f"#SBATCH --{requeue}",
        "#SBATCH --open-mode=append",
        "",
        *batch.setup,
        *([""] if batch.setup else []),
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def submit_script(text: str) -> str:
    """
    Submit a script with sbatch; return the job number.

    Raises:
        ConfigError: sbatch was not found.
        RendezvousError: Slurm refused the job; the message has its reason.
    """
    done = _run_slurm(
        ["sbatch", "--parsable"], text, process_setup.env_with_token(os.environ)
    )  # the nodes of the job need it
    job = done.stdout.strip().partition(";")[0]
    if done.returncode or not _JOB_PATTERN.fullmatch(job):
        raise RendezvousError(
            f"Slurm did not accept the job: {_error_reason(done)}", where="sbatch"
        )
    return job


def query_job(job: str) -> dict[str, str]:
    """
    Return the fields of a job, by Slurm's names.

    Raises:
        UsageError: this is not a job number, or Slurm does not know the job any more.
    """
    done = _run_slurm(["scontrol", "show", "job", _check_job_number(job), "--oneliner"])
    if done.returncode or "JobId=" not in done.stdout:
        raise UsageError(
            f"Slurm knows no job {job} (any more): {_error_reason(done)}",
            hint="see sacct for older ones",
        )
    pairs = re.findall(
        r"(?:^| )([A-Z][A-Za-z/:]*)=(.*?)(?= [A-Z][A-Za-z/:]*=|$)", done.stdout.splitlines()[0]
    )
    return dict(pairs)


def describe_job(found: dict[str, str]) -> str:
    """Return a job's state for people: state, nodes, times, restarts, and why it waits."""
    parts = [
        f"job {found.get('JobId', '?')} ({found.get('JobName', '?')}): {found.get('JobState', '?')}"
    ]
    wanted = (
        ("NodeList", "on {}"),
        ("RunTime", "for {}"),
        ("TimeLimit", "of {}"),
        ("Reason", "reason {}"),
        ("Restarts", "requeued {} time(s)"),
        ("ExitCode", "exit code {}"),
        ("StdOut", "output in {}"),
    )
    nothing = ("", "(null)", "None", "0", "0:0")
    parts += [text.format(found[key]) for key, text in wanted if found.get(key, "") not in nothing]
    return ", ".join(parts)


def cancel_job(job: str) -> None:
    """
    Cancel a job: Slurm sends SIGTERM, so that the workers save, and SIGKILL after KillWait.

    Raises:
        UsageError: this is not a job number.
        RendezvousError: Slurm refused; the message has its reason.
    """
    done = _run_slurm(["scancel", _check_job_number(job)])
    if done.returncode:
        raise RendezvousError(
            f"job {job} was not cancelled: {_error_reason(done)}", where="scancel"
        )


def _check_job_number(job: str) -> str:
    if not _JOB_PATTERN.fullmatch(job):
        raise UsageError(
            f"{quote_text(job)} is not a Slurm job number", hint="pdrun slurm submit prints it"
        )
    return job


def _run_slurm(
    argv: Sequence[str], text: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(
            f"{argv[0]} was not found", hint="run this where Slurm's commands are installed"
        )
    try:
        return subprocess.run(
            [program, *argv[1:]],
            input=text,
            text=True,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=False,
            encoding="utf-8",
            errors="surrogateescape",
            env=environ,
        )
    except subprocess.TimeoutExpired:
        raise RendezvousError(
            f"did not answer within {COMMAND_SECONDS:g} s", where=argv[0]
        ) from None


def _error_reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}"
