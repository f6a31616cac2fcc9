"""
The command ``pdrun rank-table`` as click sees it; the work is done by
`pdrun.launcher.cli.cli_rank_table`.
"""

from __future__ import annotations

import os

import click

_STRICT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _out() -> click.Option:
    return click.Option(
        ["-o", "--out"],
        metavar="FILE",
        default="",
        help="Write it there, at once; default: stdout.",
    )


def _files(required: bool = True) -> click.Argument:
    return click.Argument(["files"], nargs=-1, required=required, metavar="FILE...")


def group() -> click.Group:
    """Return the command with its five words."""
    found = click.Group(
        "rank-table",
        help="Ascend's rank tables: make, check, merge, convert, show.",
        context_settings=dict(_STRICT),
    )
    for command in (_make(), _check(), _merge(), _convert(), _show()):
        found.add_command(command)
    return found


def _make() -> click.Command:
    def callback(
        hosts: str, hostfile: str, devices: str | None, hccn: tuple[str, ...], job: str, out: str
    ) -> int:
        from pdrun.launcher.cli import cli_rank_table

        return cli_rank_table.create(hosts, hostfile, devices, hccn, job, out, os.uname().nodename)

    return click.Command(
        "make",
        callback=callback,
        help="Make a table of version 1.0: ranks in the order of hosts and devices.",
        params=[
            click.Option(
                ["--hosts"],
                metavar="LIST",
                default="",
                help="a,b or node[1-4]:8; default: this machine.",
            ),
            click.Option(
                ["--hostfile"], metavar="FILE", default="", help="A file of hosts, as for run."
            ),
            click.Option(
                ["--devices"], metavar="N", help="Devices of each host that does not say it."
            ),
            click.Option(
                ["--hccn"],
                metavar="[HOST=]FILE",
                multiple=True,
                help="hccn.conf of a host, or what hccn_tool -i N -ip -g printed there; repeat for each.",
            ),
            click.Option(
                ["--job"], metavar="JOB", default="", help="The nodes and workers of this job."
            ),
            _out(),
        ],
        context_settings=dict(_STRICT),
    )


def _check() -> click.Command:
    def callback(files: tuple[str, ...]) -> int:
        from pdrun.launcher.cli import cli_rank_table

        return cli_rank_table.check_files(files)

    return click.Command(
        "check",
        callback=callback,
        help="Say of each file whether a job can use it, and why not.",
        params=[_files()],
        context_settings=dict(_STRICT),
    )


def _merge() -> click.Command:
    def callback(files: tuple[str, ...], out: str) -> int:
        from pdrun.launcher.cli import cli_rank_table

        return cli_rank_table.merge(files, out)

    return click.Command(
        "merge",
        callback=callback,
        help="Make one table of several; ranks are counted anew.",
        params=[_files(), _out()],
        context_settings=dict(_STRICT),
    )


def _convert() -> click.Command:
    def callback(file: str, to: str, out: str, lossy: bool) -> int:
        from pdrun.launcher.cli import cli_rank_table

        return cli_rank_table.convert(file, to, out, lossy=lossy)

    return click.Command(
        "convert",
        callback=callback,
        help="Write a table in another dialect.",
        params=[
            click.Argument(["file"], metavar="FILE"),
            click.Option(
                ["--to"], metavar="DIALECT", required=True, help="1.0, 1.2, 2.0, group or lab."
            ),
            click.Option(
                ["--lossy"], is_flag=True, help="Leave out what the other dialect has no place for."
            ),
            _out(),
        ],
        context_settings=dict(_STRICT),
    )


def _show() -> click.Command:
    def callback(file: str) -> int:
        from pdrun.launcher.cli import cli_rank_table

        return cli_rank_table.show(file)

    return click.Command(
        "show",
        callback=callback,
        help="Print a table: a rank a line.",
        params=[click.Argument(["file"], metavar="FILE")],
        context_settings=dict(_STRICT),
    )
