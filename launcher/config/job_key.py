"""
What nodes compare to recognise each other's job: a key and the command as one line of text. Pure.
"""

from __future__ import annotations

import json

from pdrun.launcher.config.spec import JobSpec
from pdrun.names import make_name

MAX_COMMAND_CHARS = 400
"""Characters of a command that nodes show each other."""


def make_job_key(spec: JobSpec) -> str:
    """
    Return the job's name, or one made of the command: equal on nodes that were given the same
    command.
    """
    if spec.job:
        return spec.job
    import hashlib

    program = spec.program
    nodes = (
        spec.resources.nodes
        if spec.resources.required_nodes == spec.resources.nodes
        else spec.resources.node_range
    )
    text = json.dumps([program.kind, program.target, list(program.args), nodes])
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    stem = program.target.rstrip("/").rpartition("/")[2]
    return f"{make_name(stem.removesuffix('.py'))[:48]}-{digest}"


def format_command(spec: JobSpec) -> str:
    """
    Return, in one line, what must be the same on every node; equal exactly where that is.

    What is long is cut, and its digest stands for the rest.
    """
    import shlex

    program = spec.program
    kind = {"module": ["-m"], "command": ["--no-python"]}.get(program.kind, [])
    text = shlex.join(
        ["pdrun", "--nodes", spec.resources.node_range, *kind, program.target, *program.args]
    )
    text = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    if len(text) <= MAX_COMMAND_CHARS:
        return text
    import hashlib

    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[:MAX_COMMAND_CHARS]}... ({len(text)} characters, sha256 {digest})"
