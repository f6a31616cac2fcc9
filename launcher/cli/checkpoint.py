"""
``pdrun checkpoint``: show the contents of a checkpoint, transform it to another mesh.

The launcher imports nothing that imports torch. The runtime's module is loaded by name when the
command runs.
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
from pdrun.launcher.cli.options import CONTEXT_SETTINGS


def checkpoint_group() -> click.Group:
    """Return ``pdrun checkpoint``."""
    group = click.Group(
        "checkpoint",
        help="Checkpoints without a job: show, transform to another mesh, convert layout files.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    for command in (_show_command(), _transform_command(), _strategy_command()):
        group.add_command(command)
    return group


def _load_runtime_module() -> Any:
    """Return the runtime's module that describes checkpoints; it imports torch."""
    try:
        return pdrun._import_module("pdrun.parallel.checkpoint.describe")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("torch is not installed here", where="pdrun checkpoint") from None


@contextmanager
def _name_refused_file() -> Iterator[None]:
    """Turn an error of the system into a ConfigError that names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(
            f"cannot be used: {error.strerror}", where=os.fsdecode(error.filename)
        ) from error


def _mesh_options() -> list[click.Parameter]:
    return [
        click.Option(["--mesh"], metavar="AXIS=N,..", default="", help="The new mesh: dp=2,tp=4."),
        click.Option(
            ["--strategy"],
            metavar="FILE",
            default="",
            help=(
                "Layouts of the weights: the file of run.plan.save, or MindSpore's JSON. "
                "Default: every weight is replicated."
            ),
        ),
    ]


def _show_command() -> click.Command:
    def show(folder: str, mesh: str, strategy: str, json: bool) -> int:
        with _name_refused_file():
            text = _load_runtime_module().show_checkpoint(folder, mesh, strategy, json)
        print(text)
        return 0

    return click.Command(
        "show",
        callback=show,
        help="Print the contents of a checkpoint; with --mesh, the files that each rank reads.",
        params=[
            click.Argument(["folder"], metavar="FOLDER"),
            *_mesh_options(),
            click.Option(["--json"], is_flag=True, help="Print one JSON object."),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _transform_command() -> click.Command:
    def transform(source: str, target: str, mesh: str, strategy: str) -> int:
        with _name_refused_file():
            text = _load_runtime_module().transform_and_report(source, target, mesh, strategy)
        print(text)
        return 0

    return click.Command(
        "transform",
        callback=transform,
        help=(
            "Transform the checkpoint SOURCE to another mesh: "
            "write one file per rank to the folder TARGET."
        ),
        params=[
            click.Argument(["source"], metavar="SOURCE"),
            click.Argument(["target"], metavar="TARGET"),
            *_mesh_options(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _strategy_command() -> click.Command:
    def convert_strategy(file: str, to: str) -> int:
        with _name_refused_file():
            text = _load_runtime_module().convert_layout_file(file, to)
        sys.stdout.write(text)
        return 0

    return click.Command(
        "strategy",
        callback=convert_strategy,
        help="Print a layout file in pdrun's or in MindSpore's format.",
        params=[
            click.Argument(["file"], metavar="FILE"),
            click.Option(
                ["--to"],
                type=click.Choice(["pdrun", "mindspore"]),
                required=True,
                help="The format.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
