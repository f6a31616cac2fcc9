"""
``pdrun env`` and ``pdrun translate``: what pdrun finds on this machine and in its environment, and
its own line for another launcher's command.

The commands start and change nothing.
"""

from __future__ import annotations

import datetime
import json as json_module
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import click

from pdrun import process_setup
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.detect import detect_launcher
from pdrun.launcher.adapters.model import LauncherInfo, Probes
from pdrun.launcher.adapters.probes import make_probes
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import network
from pdrun.launcher.config import detected
from pdrun.launcher.config.resolve import ResolvedSpec, resolve_spec
from pdrun.launcher.config.settings import Priority, Setting, Source, read_environment
from pdrun.launcher.hosts.nodelist import compress_names
from pdrun.launcher.plan import environment_report, facts, render
from pdrun.launcher.plan.environment import display_value
from pdrun.launcher.plan.model import Facts
from pdrun.launcher.plan.placement import place_workers

MAX_HOSTS_CHARACTERS = 200
LAUNCHER_ROWS = (
    ("rank", "rank"),
    ("of", "world"),
    ("local rank", "local_rank"),
    ("tasks here", "local_size"),
    ("node rank", "node_rank"),
    ("nodes", "nodes"),
    ("hosts", "hosts"),
    ("meet at", "head"),
    ("port", "port"),
    ("file", "path"),
    ("job", "job_id"),
    ("attempt", "attempt"),
    ("limit", "time_limit"),
    ("ends at", "ends_at"),
)
"""Label and field of what a launcher's environment contains."""


def translate_command() -> click.Command:
    """Return ``pdrun translate``."""

    def print_translation(words: tuple[str, ...]) -> int:
        from pdrun.launcher.cli.run import check_translation
        from pdrun.launcher.translate.command_line import translate_command_line

        found = translate_command_line(words, os.environ)
        check_translation(found)
        click.echo(found.format_line())
        for note in (*found.notes, *found.left_out):
            print(f"pdrun: note: {note}", file=sys.stderr)
        return 0

    return click.Command(
        "translate",
        callback=print_translation,
        help=(
            "Print pdrun's command line for one of torchrun, torch.distributed.launch, msrun,"
            " accelerate launch, deepspeed, horovodrun, mpirun, mpiexec or colossalai run."
            " An option without a counterpart is refused with the reason."
            " Example: pdrun translate -- torchrun --nproc-per-node 8 train.py"
        ),
        params=[
            click.Argument(
                ["words"], nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND..."
            )
        ],
        context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    )


def env_command() -> click.Command:
    """Return ``pdrun env``."""

    def show_environment(json: bool) -> int:
        environ = process_setup.env_with_token(os.environ)
        sys.stdout.write(report_environment(environ, make_probes(), as_json=json))
        return 0

    return click.Command(
        "env",
        callback=show_environment,
        help="Show what pdrun finds on this machine and in its environment.",
        params=[click.Option(["--json"], is_flag=True, help="Print one JSON object.")],
        context_settings=dict(CONTEXT_SETTINGS),
    )


@dataclass(frozen=True)
class EnvironmentReport:
    """Everything that the command prints."""

    environ: Mapping[str, str]
    facts: Facts
    use: str
    """The backend that a job would use, or why no backend can be used."""
    launcher: LauncherInfo
    launcher_error: str
    """Why no launcher was detected: its variables contradict each other."""
    notes: tuple[str, ...]
    error: str
    """Why the variables do not describe a job."""


def report_environment(
    environ: Mapping[str, str], probes: Probes | None = None, *, as_json: bool = False
) -> str:
    """
    Return the report. Variables that contradict each other are reported, not raised.

    Args:
        environ: the environment variables.
        probes: functions that check a launcher's variables against this machine; None: no checks.
        as_json: return one JSON object instead of text.
    """
    report = _gather_report(environ, probes or Probes())
    if as_json:
        return json_module.dumps(_report_data(report), indent=2) + "\n"
    text = environment_report.format_environment(report.facts, report.use)
    text += "\nlauncher:\n" + format_launcher(report.launcher, report.launcher_error)
    lines = [f"  {note}" for note in report.notes]
    if report.error and report.error != report.launcher_error:
        lines.append(f"  error: {report.error}")
    if lines:
        text += "\nnotes:\n" + "\n".join(lines) + "\n"
    return text


def _gather_report(environ: Mapping[str, str], probes: Probes) -> EnvironmentReport:
    resolved, error = _resolve_variables(environ, probes)
    spec = resolved.spec
    here = facts.gather_facts(spec, process_setup.env_without_token(environ))
    here = replace(here, environ=environ)
    here = facts.with_network(
        here, network.list_addresses(), network.find_local_address(spec.place.scheduler)
    )
    try:
        placement = place_workers(spec, here, resolved.sources)
        use = f"{placement.backend.name}: {placement.workers} worker(s) per node by default"
    except PdrunError as no_backend:
        use = f"nothing: {no_backend}"
    launcher, launcher_error = _detect_launcher(environ, probes)
    return EnvironmentReport(
        environ=environ,
        facts=here,
        use=use,
        launcher=launcher,
        launcher_error=launcher_error,
        notes=resolved.notes,
        error=error,
    )


def _resolve_variables(environ: Mapping[str, str], probes: Probes) -> tuple[ResolvedSpec, str]:
    """Return the job that the variables alone describe, and what is wrong with them."""
    source = Source("pdrun env", Priority.COMMAND)
    program = [
        Setting("program.target", "true", source),
        Setting("program.kind", "command", source),
        Setting("program.args", (), source),
    ]
    try:
        settings, notes = read_environment(environ)
        launcher_settings, _, warnings = detected.detect_settings(settings, environ, probes)
        return resolve_spec([*program, *settings, *launcher_settings], (*notes, *warnings)), ""
    except PdrunError as error:
        return resolve_spec(program), str(error)


def _detect_launcher(environ: Mapping[str, str], probes: Probes) -> tuple[LauncherInfo, str]:
    """Return the launcher that the variables describe, and why it could not be detected."""
    launcher = environ.get("PDRUN_LAUNCHER", "")
    try:
        return detect_launcher(environ, probes, detected.launcher_to_detect(launcher)), ""
    except PdrunError as error:
        return LauncherInfo(), str(error)


def format_launcher(found: LauncherInfo, error: str = "") -> str:
    """Return the launcher's values with their variables, and what was ignored and why."""
    if error:
        return f"  error: {error}\n"
    kinds = {
        "task": "this process is one of its tasks",
        "allocation": "hosts are allocated, nothing was started",
    }
    title = f"  {found.title}"
    if found.kind in kinds:
        title += f" [{found.launcher}]: {kinds[found.kind]}"
    lines = [title]
    for label, name in LAUNCHER_ROWS:
        value = getattr(found, name)
        if value in (None, "", ()) or (name == "attempt" and not value):
            continue
        line = f"    {label:<11}{_format_value(name, value)}"
        if found.sources.get(name):
            line += f"   by {found.sources[name]}"
        lines.append(line)
    lines += [f"  ignored: {item.launcher}: {item.why}" for item in found.ignored]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def _format_value(name: str, value: object) -> str:
    if name == "hosts" and isinstance(value, tuple):
        text = compress_names([host.name for host in value])
        if len(text) > MAX_HOSTS_CHARACTERS:
            return text[: MAX_HOSTS_CHARACTERS - 3] + "..."
        return text
    if isinstance(value, float):
        if name == "ends_at":
            time = datetime.datetime.fromtimestamp(value, datetime.UTC)
            return time.strftime("%Y-%m-%d %H:%M:%S UTC")
        return render.format_duration(value)
    return str(value)


def _report_data(report: EnvironmentReport) -> dict[str, Any]:
    found = report.launcher
    launcher = {field.name: getattr(found, field.name) for field in fields(LauncherInfo)}
    launcher["hosts"] = [asdict(host) for host in found.hosts]
    launcher["ignored"] = [asdict(item) for item in found.ignored]
    launcher["error"] = report.launcher_error
    backends = []
    for backend in report.facts.backends:
        backends.append(
            {
                "name": backend.name,
                "present": backend.present,
                "reason": backend.reason,
                "devices": len(backend.devices),
            }
        )
    variables = {}
    for family, names in environment_report.group_variables(report.environ).items():
        variables[family] = {name: display_value(name, report.environ[name]) for name in names}
    return {
        "pdrun": report.facts.pdrun_version,
        "python": report.facts.python_version,
        "torch": report.facts.torch_version,
        "host": report.facts.hostname,
        "addresses": [list(pair) for pair in report.facts.addresses],
        "route": report.facts.route_address,
        "cpus": list(report.facts.cpus.cpus),
        "quota": report.facts.cpus.quota,
        "use": report.use,
        "backends": backends,
        "environment": variables,
        "launcher": launcher,
        "notes": list(report.notes),
        "error": report.error,
    }
