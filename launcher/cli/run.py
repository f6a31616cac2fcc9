"""
``pdrun run``: from arguments to a plan, which is printed or executed.

The options are those of the tables `run_options.RUN_OPTIONS` and `aliases.ALIAS_OPTIONS`. Parsing
stops at the script: everything behind it belongs to the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pdrun import async_writer
from pdrun.errors import UsageError
from pdrun.launcher.adapters.model import Probes
from pdrun.launcher.adapters.probes import make_probes
from pdrun.launcher.cli import help as cli_help
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    click_options,
    complete_names,
    settings_from_options,
)
from pdrun.launcher.config import detected
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.resolve import ResolvedSpec, resolve_spec
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.settings import (
    Setting,
    read_environment,
    unknown_variables,
)
from pdrun.launcher.config.torchrun_settings import ignore_master_beside_endpoint
from pdrun.launcher.plan import external
from pdrun.launcher.plan.model import Facts, LaunchPlan
from pdrun.launcher.translate.program_settings import program_settings
from pdrun.quick_dataclass import dataclass
from pdrun.topology import is_in_kubernetes

if TYPE_CHECKING:
    from pdrun.launcher.launch.agent_options import AgentOptions
    from pdrun.launcher.translate.command_line import TranslationCheck
    from pdrun.launcher.translate.model import Translation

TASK_VARIABLE_PREFIXES = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PALS_",
    "JSM_",
    "FLUX_",
    "MV2_",
    "MPI_",
    "HYDRA_",
)
"""
Prefixes of the variables of launchers that start all nodes and show their output on one terminal.
"""


class RunCommand(click.Command):
    """``pdrun run``: the tables of options make its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Complete abbreviated options, then parse."""
        return super().parse_args(ctx, complete_names(args, (*RUN_OPTIONS, *ALIAS_OPTIONS)))

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the complete help."""
        cli_help.write_run_help(formatter)


def run_command() -> click.Command:
    """Return ``pdrun run``."""

    def start_run(words: tuple[str, ...], **params: Any) -> int:
        return run_job(params, words)

    words = click.Argument(
        ["words"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_files
    )
    return RunCommand(
        "run",
        callback=start_run,
        params=[*click_options((*RUN_OPTIONS, *ALIAS_OPTIONS)), words],
        context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    )


def _complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@dataclass(frozen=True)
class RunRequest:
    """What a command line requests: a job, and whether to execute or only print its plan."""

    resolved: ResolvedSpec
    dry_run: bool = False
    explain: bool = False
    json: bool = False
    warnings: tuple[str, ...] = ()
    """Problems that do not stop the job: left-over variables, launchers that disagree."""


def parse_arguments(arguments: Sequence[str]) -> RunRequest:
    """
    Return what ``pdrun run ARGUMENTS`` would request in an empty environment.

    Raises:
        click.ClickException, PdrunError: an option or a value is wrong.
    """
    with run_command().make_context("run", list(arguments)) as context:
        params = dict(context.params)
        return parse_request(params, params.pop("words"), {}, check=_refuse_inner_launcher)


def check_translation(found: Translation) -> None:
    """Raise a UsageError, or another PdrunError, if ``pdrun`` would refuse a translated line."""
    if "--rank-table" in found.options:  # it may not be written yet
        return
    try:
        parse_arguments(found.words)
    except click.ClickException as error:
        raise UsageError(error.format_message(), where=found.launcher) from None


def _refuse_inner_launcher(found: Translation) -> None:
    """Refuse a line for the program of a line that is checked itself: the check does not nest."""
    raise UsageError(f"{found.launcher} would be started by another launcher")


def parse_request(
    params: Mapping[str, Any],
    words: Sequence[str],
    environ: Mapping[str, str],
    probes: Probes | None = None,
    *,
    check: TranslationCheck = check_translation,
    more: Sequence[Setting] = (),
) -> RunRequest:
    """
    Return what a command line requests. Reads the job file and the hostfile that it names.

    Args:
        params: the options, as click parsed them.
        words: the script or job file, and its arguments.
        environ: the environment variables to use.
        probes: functions that check a launcher's variables against this machine. None: no checks,
            as for another machine's environment.
        check: of pdrun's line in the error about a program that is a launcher.
        more: settings that are no options of ``run``.

    Raises:
        PdrunError: a value is wrong; the error names its source.
    """
    settings, notes = settings_from_options((*RUN_OPTIONS, *ALIAS_OPTIONS), params)
    settings += more
    variables, variable_notes = read_environment(environ)
    modes = {setting.path for setting in settings if setting.path.startswith("ask.")}
    settings = [setting for setting in settings if not setting.path.startswith("ask.")]
    settings += program_settings(words, [*settings, *variables], check)
    if "ask.json" in modes and "ask.dry_run" not in modes:
        raise UsageError(
            "prints the plan as JSON and requires --dry-run", where="--json", hint="add --dry-run"
        )
    settings, ignored = ignore_master_beside_endpoint([*settings, *variables])
    settings = read_hostfiles(settings)
    launcher_settings, why, warnings = detected.detect_settings(
        settings, environ, probes or Probes()
    )
    settings += launcher_settings
    if any(setting.path == "place.rank_table" for setting in settings):
        from pdrun.launcher.config.rank_table import apply_rank_table

        settings, table_notes = apply_rank_table(settings, environ)
        why = (*why, *table_notes)
    all_notes = (*notes, *variable_notes, *ignored, *why, *warnings)
    resolved = resolve_spec(settings, all_notes)
    return RunRequest(
        resolved,
        dry_run="ask.dry_run" in modes,
        explain="ask.explain" in modes,
        json="ask.json" in modes,
        warnings=warnings,
    )


def read_hostfiles(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings with each hostfile replaced by the hosts that it lists."""
    from pdrun.launcher.hosts import hostfile

    result = []
    for setting in settings:
        if setting.path == "hosts.file":
            source = replace(setting.source, text="")
            try:
                hosts = hostfile.read_hostfile(setting.value, _read_stdin)
            except UsageError as error:
                raise setting.source.convert_file_error(error) from None
            setting = Setting("hosts.all", hosts, source)
        result.append(setting)
    return result


def _read_stdin(limit: int) -> bytes:
    return sys.stdin.buffer.read(limit)


def plan_job(resolved: ResolvedSpec, *, assumes: bool = False) -> tuple[LaunchPlan, Facts]:
    """
    Gather the facts of this machine and plan the job.

    Args:
        assumes: devices that this machine lacks are assumed: the plan is only printed.
    """
    from pdrun.launcher.plan.facts import gather_facts
    from pdrun.launcher.plan.placement import assume_devices
    from pdrun.launcher.plan.plan import make_plan

    resolved = _limit_grace(resolved)
    facts = gather_facts(
        resolved.spec,
        external_launcher=external.external_launcher_for(resolved.spec, resolved.sources),
    )
    notes = resolved.notes
    if assumes:
        facts, assumed = assume_devices(resolved.spec, facts)
        notes = (*notes, *assumed)
        print_warnings(assumed)
    return make_plan(resolved.spec, facts, resolved.sources, notes), facts


def _limit_grace(resolved: ResolvedSpec) -> ResolvedSpec:
    """Limit the grace time of a job that srun started to Slurm's KillWait. Node rank 0 decides."""
    is_slurm = resolved.sources.get("place.node_rank", "").startswith("SLURM_")
    if resolved.spec.place.node_rank != 0 or not is_slurm:
        return resolved
    from pdrun.launcher.plan.find_launchers import parse_kill_wait, read_slurm_config

    spec, note = external.fit_grace(
        resolved.spec, parse_kill_wait(read_slurm_config(os.environ)), resolved.sources
    )
    notes = (*resolved.notes, note) if note else resolved.notes
    return ResolvedSpec(spec, resolved.sources, notes)


def run_job(params: Mapping[str, Any], words: Sequence[str], more: Sequence[Setting] = ()) -> int:
    """
    Print the plan, or execute it; return the job's exit code.

    Args:
        more: settings that are no options of ``run``.
    """
    request = parse_request(params, words, os.environ, make_probes(), more=more)
    if not request.explain:  # --explain lists them among the reasons
        warn_of_unknown_variables(os.environ)
    if not request.dry_run:
        await_scheduler_name(request.resolved)
        print_warnings(request.warnings)
    plan, facts = plan_job(request.resolved, assumes=request.dry_run)
    if not request.dry_run:
        _print_notices(request.resolved, words, len(plan.workers))
    if request.explain or request.dry_run:
        _print_plan(request, plan, facts)
    if request.dry_run:
        return 0
    from pdrun.launcher.launch.execute import execute

    options = _agent_options(request.resolved)
    return int(execute(plan) if options is None else execute(plan, options))


def _agent_options(resolved: ResolvedSpec) -> AgentOptions | None:
    """
    Return the options of an agent that mpirun or srun started; None for any other agent.

    Only the first task prints what is printed once per job.
    """
    from pdrun.launcher.launch.agent_options import AgentOptions

    if not resolved.sources.get("place.node_rank", "").startswith(TASK_VARIABLE_PREFIXES):
        return None
    return AgentOptions(is_quiet=(resolved.spec.place.node_rank or 0) > 0, all_nodes_started=True)


def await_scheduler_name(resolved: ResolvedSpec) -> None:
    """
    Wait until the scheduler's name resolves, at most for the start timeout. In Kubernetes also wait
    for the pods on which this process starts agents.
    """
    from pdrun.launcher.common import network
    from pdrun.launcher.plan.facts import is_networked
    from pdrun.launcher.plan.hosts import uses_ssh

    spec = resolved.spec
    if is_in_kubernetes() and uses_ssh(spec):
        names = [host.peer_address for host in spec.place.hosts]
        network.wait_for_host_names(names, spec.policy.start_timeout, async_writer.write_message)
    scheduler = resolved.spec.place.scheduler
    if scheduler is not None and is_networked(resolved.spec):
        network.wait_for_name(
            scheduler, resolved.spec.policy.start_timeout, async_writer.write_message
        )


def warn_of_unknown_variables(environ: Mapping[str, str]) -> None:
    """
    Print a warning for every unknown PDRUN_ variable.

    Without it, a typing error would silently start a job of another size.
    """
    print_warnings(unknown_variables(environ))


def _print_notices(resolved: ResolvedSpec, words: Sequence[str], workers: int) -> None:
    """Print what a user of torchrun may not expect. Most command lines need no check."""
    has_options = any(word.startswith("--") or "$" in word for word in words[1:])
    if not has_options and resolved.sources.get("resources.devices") != "default":
        return
    from pdrun.launcher.translate import notices

    print_warnings(notices.find_misplaced_options(words))
    print_warnings(notices.find_macros(resolved))
    print_warnings(notices.compare_default_workers(resolved, workers))


def print_warnings(lines: Iterable[str]) -> None:
    """Print warnings on stderr."""
    for text in lines:
        print(f"pdrun: warning: {text}", file=sys.stderr, flush=True)


def _print_plan(request: RunRequest, plan: LaunchPlan, facts: Facts) -> None:
    """Print the plan on stdout, or on stderr if the job's own output follows."""
    from pdrun.launcher.plan import render
    from pdrun.launcher.plan.plan import plan_simulated_nodes

    nodes = plan_simulated_nodes(plan, facts) if plan.mode == "local" else ()
    out = sys.stdout if request.dry_run else sys.stderr
    if request.json:
        out.write(render.format_plan_json(plan, nodes))
        return
    if request.dry_run:
        out.write(render.format_plan(plan, nodes))
    if request.explain and request.dry_run:
        out.write("\n")
    if request.explain:
        out.write(render.explain_plan(plan, facts))
    out.flush()
