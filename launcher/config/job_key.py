"""
What nodes compare to recognise the same job: its key and its command as text. Pure.
"""

from __future__ import annotations

import json

from pdrun.launcher.config.spec import JobSpec
from pdrun.text import make_name

MAX_COMMAND_CHARS = 400
"""Characters of a command that nodes send to the scheduler."""


def make_job_key(spec: JobSpec) -> str:
    """
    Return the job's name, or a name derived from the command. Equal commands give equal keys.
    """
    if spec.job:
        return spec.job
    import hashlib

    program = spec.program
    nodes: int | str = spec.resources.nodes
    if spec.resources.required_nodes != nodes:
        nodes = spec.resources.node_range
    parts = [program.kind, program.target, list(program.args), nodes]
    if program.prober:
        parts.append(program.prober)
    text = json.dumps(parts)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    stem = program.target.rstrip("/").rpartition("/")[2]
    return f"{make_name(stem.removesuffix('.py'))[:48]}-{digest}"


def format_command(spec: JobSpec) -> str:
    """
    Return, as one line, the part of the command that must be the same on every node.

    Texts are equal if and only if that part is. A long text is cut and its digest appended.
    """
    import shlex

    program = spec.program
    kind = {"module": ["-m"], "command": ["--no-python"]}.get(program.kind, [])
    if program.prober:
        kind = ["--serve", program.prober]
    if program.local_rank_arg:
        kind = ["--local-rank-arg", program.local_rank_arg, *kind]
    text = shlex.join(
        ["pdrun", "--nodes", spec.resources.node_range, *kind, program.target, *program.args]
    )
    text = "".join(map(_escape_unprintable, text))
    if len(text) <= MAX_COMMAND_CHARS:
        return text
    import hashlib

    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[:MAX_COMMAND_CHARS]}... ({len(text)} characters, sha256 {digest})"


def _escape_unprintable(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode()
