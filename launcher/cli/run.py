"""
``pdrun run``: from words to a plan, and then either to paper or into the world.

The options are made from the tables `options.RUN` and `aliases.ALIASES`, one click option a
spelling, so that every complaint can name what was really typed. Parsing stops at the script: what
stands behind it is the script's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from pdrun import async_writer
from pdrun.errors import UsageError
from pdrun.launcher.adapters.model import Probes
from pdrun.launcher.adapters.probes import real
from pdrun.launcher.config import detected as outer
from pdrun.launcher.config.aliases import ALIASES
from pdrun.launcher.config.options import RUN, Option
from pdrun.launcher.config.resolve import Asked, build
from pdrun.launcher.config.settings import Level, Source, Wish, from_environment, read, strangers
from pdrun.launcher.plan import external as through
from pdrun.launcher.plan.model import Facts, LaunchPlan

if TYPE_CHECKING:
    from pdrun.launcher.launch.agent_options import Seat

Rows = Sequence[Option]


def parameters(rows: Rows) -> list[click.Parameter]:
    """Return click's options for the rows of a table, one for each spelling."""
    return [_option(row, name) for row in rows for name in row.names]


def _option(row: Option, name: str) -> click.Option:
    second = (
        "_" in name and row.origin != "msrun"
    )  # the shell completes the spelling with dashes only
    if not row.metavar:
        return click.Option([name, parameter_name(name)], is_flag=True, hidden=second)
    return click.Option(
        [name, parameter_name(name)], multiple=True, type=click.UNPROCESSED, hidden=second
    )


def parameter_name(spelling: str) -> str:
    """
    Return the Python name under which click keeps an option; different for ``--a-b`` and ``--a_b``.
    """
    return "o" + spelling.replace("_", "_u").replace("-", "_d")


def from_command_line(rows: Rows, params: Mapping[str, Any]) -> tuple[list[Wish], list[str]]:
    """Return the wishes of what click has found, and the notes of the options that were used."""
    wishes: list[Wish] = []
    notes: list[str] = []
    for row in rows:
        for name in row.names:
            found = params.get(parameter_name(name))
            texts: Iterable[str] = found if isinstance(found, tuple) else [""] if found else []
            for text in texts:
                wishes += read(row, text, Source(name, Level.COMMAND, text))
                notes += [f"{name}: {row.note}"] if row.note else []
    return wishes, notes


@dataclass(frozen=True)
class Request:
    """What was asked, and what to do with it."""

    asked: Asked
    dry_run: bool = False
    explain: bool = False
    json: bool = False
    warnings: tuple[str, ...] = ()
    """
    What is wrong around the job and does not stop it: left-over variables, launchers that differ.
    """


def request(
    params: Mapping[str, Any],
    words: Sequence[str],
    environ: Mapping[str, str],
    probes: Probes | None = None,
) -> Request:
    """
    Return what a command line asks for; reads a job file where one stands in the script's place,
    and a file of hosts.

    Args:
        probes: what a launcher's words are checked with; None: with nothing, as for an environment
            of another machine.

    Raises:
        PdrunError: any of it is wrong; names the place.
    """
    wishes, notes = from_command_line((*RUN, *ALIASES), params)
    around, found = from_environment(environ)
    ask = {wish.path for wish in wishes if wish.path.startswith("ask.")}
    wishes = [wish for wish in wishes if not wish.path.startswith("ask.")]
    wishes += program(words, [*wishes, *around])
    if "ask.json" in ask and "ask.dry_run" not in ask:
        raise UsageError(
            "is the form of a plan, and there is none to show", where="--json", hint="add --dry-run"
        )
    wishes = with_hosts([*wishes, *around])
    outside, why, warnings = outer.around(wishes, environ, probes or Probes())
    everything = [*wishes, *outside]
    if any(wish.path == "place.rank_table" for wish in everything):
        from pdrun.launcher.config.rank_table import with_table

        everything, told = with_table(everything, environ)
        why = (*why, *told)
    asked = build(everything, (*notes, *found, *why, *warnings))
    return Request(asked, "ask.dry_run" in ask, "ask.explain" in ask, "ask.json" in ask, warnings)


def with_hosts(wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes, files of hosts replaced by the hosts that they list."""
    from pdrun.launcher.hosts import hostfile

    made = []
    for wish in wishes:
        if wish.path == "hosts.file":
            source = replace(wish.source, text="")
            try:
                wish = Wish("hosts.all", hostfile.read_hostfile(wish.value, _stdin), source)
            except UsageError as error:
                raise wish.source.blame_file(error) from None
        made.append(wish)
    return made


def _stdin(limit: int) -> bytes:
    return sys.stdin.buffer.read(limit)


def program(words: Sequence[str], said: Iterable[Wish]) -> list[Wish]:
    """
    Return the wishes for what stands in the script's place: a program with its arguments, or a job
    file.
    """
    if not words:
        return []
    target, *args = words
    source = Source("command line", Level.COMMAND, target)
    plain = not any(wish.path == "program.kind" for wish in said)
    if plain and _is_job_file(target):
        from pdrun.launcher.config.job_file import load

        lines = list(load(target))
        before = next((wish.value for wish in lines if wish.path == "program.args"), ())
        if args:
            return [*lines, Wish("program.args", (*before, *args), source)]
        return lines
    if not target:
        raise UsageError("the script's name is empty")
    return [Wish("program.target", target, source), Wish("program.args", tuple(args), source)]


def _is_job_file(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def make_plan(asked: Asked) -> tuple[LaunchPlan, Facts]:
    """Look at this machine and decide."""
    from pdrun.launcher.plan.facts import gather
    from pdrun.launcher.plan.plan import plan

    asked = _within_kill_wait(asked)
    facts = gather(asked.spec, starter=through.starter_for(asked.spec, asked.sources))
    return plan(asked.spec, facts, asked.sources, asked.notes), facts


def _within_kill_wait(asked: Asked) -> Asked:
    """
    Fit the grace of a job whose nodes srun has started into the time that Slurm leaves it; node 0
    has the say.
    """
    if asked.spec.place.node_rank != 0 or not asked.sources.get("place.node_rank", "").startswith(
        "SLURM_"
    ):
        return asked
    from pdrun.launcher.plan.find_launchers import kill_wait, slurm_config

    spec, note = through.within(asked.spec, kill_wait(slurm_config(os.environ)), asked.sources)
    return Asked(spec, asked.sources, (*asked.notes, note) if note else asked.notes)


def run(params: Mapping[str, Any], words: Sequence[str]) -> int:
    """
    Do what ``pdrun run`` was told: print the plan, or execute it and return the job's exit code.
    """
    asked = request(params, words, os.environ, real())
    if not asked.explain:  # which says it among the reasons
        warn_of_strangers(os.environ)
    if not asked.dry_run:
        await_scheduler_name(asked.asked)
        warn(asked.warnings)
    plan, facts = make_plan(asked.asked)
    if asked.explain or asked.dry_run:
        _print(asked, plan, facts)
    if asked.dry_run:
        return 0
    from pdrun.launcher.launch.execute import execute

    seat = _seat(asked.asked)
    return int(execute(plan) if seat is None else execute(plan, seat))


_TASKS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "JSM_", "FLUX_", "MV2_", "MPI_", "HYDRA_")
"""
Beginnings of the variables by which one launcher starts all nodes and shows their output on one
terminal.
"""


def _seat(asked: Asked) -> Seat | None:
    """
    Return the seat of an agent among the tasks of mpirun or srun, of which the first one speaks for
    the job.
    """
    from pdrun.launcher.launch.agent_options import Seat

    if not asked.sources.get("place.node_rank", "").startswith(_TASKS):
        return None
    return Seat(quiet=(asked.spec.place.node_rank or 0) > 0, together=True)


def await_scheduler_name(asked: Asked) -> None:
    """
    Hold the plan back until the scheduler's name leads somewhere, for the start timeout at most.
    """
    from pdrun.launcher.common import network
    from pdrun.launcher.plan.facts import is_networked

    where = asked.spec.place.scheduler
    if where is not None and is_networked(asked.spec):
        network.await_name(where, asked.spec.policy.start_timeout, async_writer.write_message)


def warn_of_strangers(environ: Mapping[str, str]) -> None:
    """
    Say on stderr which PDRUN_ variables nobody reads: a typing slip must not start a job of another
    size unseen.
    """
    warn(strangers(environ))


def warn(lines: Iterable[str]) -> None:
    """Print warnings on stderr."""
    for text in lines:
        print(f"pdrun: warning: {text}", file=sys.stderr, flush=True)


def _print(asked: Request, plan: LaunchPlan, facts: Facts) -> None:
    """Print to stdout what was asked for; to stderr when the job's own output follows."""
    from pdrun.launcher.plan import render as show
    from pdrun.launcher.plan.plan import simulated

    nodes = simulated(plan, facts) if plan.mode == "local" else ()
    out = sys.stdout if asked.dry_run else sys.stderr
    if asked.json:
        out.write(show.plan_json(plan, nodes))
        return
    if asked.dry_run:
        out.write(show.plan_text(plan, nodes))
    if asked.explain:
        out.write(("\n" if asked.dry_run else "") + show.explain(plan, facts))
    out.flush()
