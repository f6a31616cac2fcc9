"""
``pdrun checkpoint``: what is in a checkpoint, and laying one out for another mesh.

Tensors are the runtime's business, which this floor imports nothing of: it is reached by its name,
as scripts reach it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import pdrun
from pdrun.errors import ConfigError

_STRICT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def group() -> click.Group:
    """Return the command with its words."""
    found = click.Group(
        "checkpoint",
        help="Checkpoints without a job: show, transform to another mesh, convert files of layouts.",
        context_settings=dict(_STRICT),
    )
    for command in (_show(), _transform(), _strategy()):
        found.add_command(command)
    return found


def _offline() -> Any:
    """Return the runtime's module for checkpoints."""
    try:
        return pdrun._import_module("pdrun.parallel.checkpoint.describe")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("torch is not installed here", where="pdrun checkpoint") from None


@contextmanager
def _naming() -> Iterator[None]:
    """Name the file that the system refuses: a closed folder, say, is no fault of pdrun's."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(
            f"cannot be used: {error.strerror}", where=os.fsdecode(error.filename)
        ) from error


def _placed() -> list[click.Parameter]:
    return [
        click.Option(
            ["--mesh"], metavar="AXIS=N,..", default="", help="The new ranks, as dp=2,tp=4."
        ),
        click.Option(
            ["--strategy"],
            metavar="FILE",
            default="",
            help="Where weights lie: run.plan.save's file, or MindSpore's JSON. Default: whole everywhere.",
        ),
    ]


def _show() -> click.Command:
    def callback(folder: str, mesh: str, strategy: str, json: bool) -> int:
        with _naming():
            text = _offline().show(folder, mesh, strategy, json)
        print(text)
        return 0

    return click.Command(
        "show",
        callback=callback,
        help="Print what is in a checkpoint; with a mesh, whose files each rank of it needs.",
        params=[
            click.Argument(["folder"], metavar="FOLDER"),
            *_placed(),
            click.Option(["--json"], is_flag=True, help="Print one JSON object."),
        ],
        context_settings=dict(_STRICT),
    )


def _transform() -> click.Command:
    def callback(source: str, target: str, mesh: str, strategy: str) -> int:
        with _naming():
            text = _offline().transformed(source, target, mesh, strategy)
        print(text)
        return 0

    return click.Command(
        "transform",
        callback=callback,
        help="Lay the checkpoint SOURCE out for another mesh, in the folder TARGET: each rank's part in its own file.",
        params=[
            click.Argument(["source"], metavar="SOURCE"),
            click.Argument(["target"], metavar="TARGET"),
            *_placed(),
        ],
        context_settings=dict(_STRICT),
    )


def _strategy() -> click.Command:
    def callback(file: str, to: str) -> int:
        with _naming():
            text = _offline().converted(file, to)
        sys.stdout.write(text)
        return 0

    return click.Command(
        "strategy",
        callback=callback,
        help="Print a file of layouts in pdrun's or in MindSpore's form.",
        params=[
            click.Argument(["file"], metavar="FILE"),
            click.Option(
                ["--to"], type=click.Choice(["pdrun", "mindspore"]), required=True, help="The form."
            ),
        ],
        context_settings=dict(_STRICT),
    )
