"""
``pdrun checkpoint``: show the contents of a checkpoint, transform it, export its tables.

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
    for command in (_show_command(), _transform_command(), _export_command(), _strategy_command()):
        group.add_command(command)
    return group


def _load_runtime_module(name: str = "pdrun.parallel.servers.tables.describe") -> Any:
    """Return the runtime's module that describes checkpoints; it imports torch."""
    try:
        return pdrun._import_module(name)
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
            text = _load_runtime_module().show_with_tables(folder, mesh, strategy, json)
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
    def transform(source: str, target: str, mesh: str, strategy: str, servers: int | None) -> int:
        with _name_refused_file():
            module = _load_runtime_module()
            text = module.transform_with_tables(source, target, mesh, strategy, servers)
        print(text)
        return 0

    return click.Command(
        "transform",
        callback=transform,
        help=(
            "Transform the checkpoint SOURCE to another mesh: "
            "write one file per rank to the folder TARGET. With --servers, tables of parameter "
            "servers get files for that number of servers."
        ),
        params=[
            click.Argument(["source"], metavar="SOURCE"),
            click.Argument(["target"], metavar="TARGET"),
            *_mesh_options(),
            click.Option(
                ["--servers"],
                type=int,
                metavar="N",
                help="The new number of parameter servers. Default: as they were saved.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _export_command() -> click.Command:
    def export(source: str, target: str, state: bool) -> int:
        with _name_refused_file():
            text = _load_runtime_module().export_tables(source, target, state)
        print(text)
        return 0

    return click.Command(
        "export",
        callback=export,
        help=(
            "Write the tables of parameter servers to one safetensors file: NAME and NAME.ids of "
            "rows, NAME of dense weights."
        ),
        params=[
            click.Argument(["source"], metavar="SOURCE"),
            click.Argument(["target"], metavar="FILE"),
            click.Option(["--state"], is_flag=True, help="Also write the optimizers' state."),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def _strategy_command() -> click.Command:
    def convert_strategy(file: str, to: str) -> int:
        with _name_refused_file():
            text = _load_runtime_module("pdrun.parallel.checkpoint.describe").convert_layout_file(
                file, to
            )
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
