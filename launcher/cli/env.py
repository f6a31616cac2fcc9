"""
``pdrun env``: what this machine and its environment mean to pdrun; starts nothing and changes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace

from pdrun import process_setup
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.detect import detect
from pdrun.launcher.adapters.model import Found, Probes
from pdrun.launcher.common import network
from pdrun.launcher.config import detected as outer
from pdrun.launcher.config.resolve import Asked, build
from pdrun.launcher.config.settings import Level, Source, Wish, from_environment
from pdrun.launcher.plan import facts
from pdrun.launcher.plan import render as show
from pdrun.launcher.plan.environment import shown
from pdrun.launcher.plan.model import Facts
from pdrun.launcher.plan.placement import place


def report(
    environ: Mapping[str, str], probes: Probes | None = None, *, as_json: bool = False
) -> str:
    """
    Return the report; an environment that contradicts itself is a line of it, not an end.

    Args:
        probes: what a launcher's words are checked with; None: nothing.
        as_json: one JSON object in the place of text.
    """
    asked, trouble = _asked(environ, probes or Probes())
    here = replace(
        facts.gather(asked.spec, process_setup.env_without_token(environ)), environ=environ
    )
    here = facts.with_network(here, network.addresses(), network.route(asked.spec.place.scheduler))
    try:
        placement = place(asked.spec, here, asked.sources)
        chosen = f"{placement.backend.name}: {placement.workers} worker(s) a node by default"
    except PdrunError as error:
        chosen = f"nothing: {error}"
    found, fault = _found(environ, probes or Probes(), asked)
    if as_json:
        return _json(environ, here, chosen, found, fault, asked, trouble)
    text = show.environment_text(here, chosen) + "\nlauncher:\n" + found_text(found, fault)
    lines = [f"  {note}" for note in asked.notes] + (
        [f"  error: {trouble}"] if trouble and trouble != fault else []
    )
    return text + ("\nnotes:\n" + "\n".join(lines) + "\n" if lines else "")


def _asked(environ: Mapping[str, str], probes: Probes) -> tuple[Asked, str]:
    """What the environment alone asks for, and what is wrong with it."""
    here = Source("pdrun env", Level.COMMAND)
    program = [
        Wish("program.target", "true", here),
        Wish("program.kind", "command", here),
        Wish("program.args", (), here),
    ]
    try:
        said, notes = from_environment(environ)
        outside, _, warnings = outer.around(said, environ, probes)
        return build([*program, *said, *outside], (*notes, *warnings)), ""
    except PdrunError as error:
        return build(program), str(error)


def _found(environ: Mapping[str, str], probes: Probes, asked: Asked) -> tuple[Found, str]:
    launcher = environ.get("PDRUN_LAUNCHER", "")
    try:
        return detect(environ, probes, outer.to_detect(launcher)), ""
    except PdrunError as error:
        return Found(), str(error)


_ROWS = (
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


def found_text(found: Found, fault: str = "") -> str:
    """
    Return what was found, with the variable that said it, and what was ignored, with the reason.
    """
    if fault:
        return f"  error: {fault}\n"
    what = {
        "task": "this process is one of its tasks",
        "allocation": "hosts are held, nothing was started",
    }
    lines = [
        f"  {found.title}"
        + (f" [{found.launcher}]: {what[found.kind]}" if found.kind in what else "")
    ]
    for label, name in _ROWS:
        value = getattr(found, name)
        if value in (None, "", ()) or (name == "attempt" and not value):
            continue
        source = found.sources.get(name, "")
        lines.append(f"    {label:<11}{_said(name, value)}" + (f"   by {source}" if source else ""))
    lines += [f"  ignored: {item.launcher}: {item.why}" for item in found.ignored]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def _said(name: str, value: object) -> str:
    if name == "hosts" and isinstance(value, tuple):
        from pdrun.launcher.hosts.nodelist import compress

        text = compress([host.name for host in value])
        return text if len(text) <= 200 else text[:197] + "..."
    if isinstance(value, float):
        import datetime

        if name == "ends_at":
            return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime(
                "%Y-%m-%d %H:%M:%S UTC"
            )
        return show.seconds(value)
    return str(value)


def _json(
    environ: Mapping[str, str],
    here: Facts,
    chosen: str,
    found: Found,
    fault: str,
    asked: Asked,
    trouble: str,
) -> str:
    launcher = {field.name: getattr(found, field.name) for field in fields(Found)}
    launcher["hosts"] = [asdict(host) for host in found.hosts]
    launcher["ignored"] = [asdict(item) for item in found.ignored]
    launcher["error"] = fault
    data = {
        "pdrun": here.pdrun_version,
        "python": here.python_version,
        "torch": here.torch_version,
        "host": here.hostname,
        "addresses": [list(pair) for pair in here.addresses],
        "route": here.route_address,
        "cpus": list(here.cpus.cpus),
        "quota": here.cpus.quota,
        "use": chosen,
        "backends": [
            {
                "name": one.name,
                "present": one.present,
                "reason": one.reason,
                "devices": len(one.devices),
            }
            for one in here.backends
        ],
        "environment": {
            family: {name: shown(name, environ[name]) for name in names}
            for family, names in show.families(environ).items()
        },
        "launcher": launcher,
        "notes": list(asked.notes),
        "error": trouble,
    }
    return json.dumps(data, indent=2) + "\n"
