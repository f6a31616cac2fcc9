"""
Golden environments: a YAML file is an environment with the answers of the probes, and what must be
found.

``PDRUN_GOLDEN=write pytest tests/launcher/adapters`` writes what comes out into the files, for reading in a
diff. Besides ``environ``:

    host: n1             name of this machine (default: host1)
    here: [10.0.0.1]     further names and addresses of this machine
    above: [71, srun]    pids and command names of the processes above; left out: a container hides them
    open: [9]            open descriptors
    listening: [60757]   ports of 127.0.0.1 that answer
    words: {--control-port: "h1:4000"}   of the launcher's daemon above
    files: {/etc/hosts: "..."}
    launcher: NAME       --launcher
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from pdrun.errors import PdrunError
from pdrun.launcher.adapters.detect import detect_launcher
from pdrun.launcher.adapters.model import LauncherInfo, Probes

HERE = Path(__file__).parent
MARK = "expect: |\n"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def recorded(name: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return the (environment, facts of the process) of each task of a recording."""
    found = []
    for line in (HERE / "environments" / name).read_text().splitlines():
        data = json.loads(line)
        facts = {key: value for key, value in data.items() if key.startswith("__")}
        found.append(({key: value for key, value in data.items() if key not in facts}, facts))
    return found


def probes(case: dict[str, Any]) -> Probes:
    """Return the probes of a case."""
    host, above = case.get("host", "host1"), case.get("above")
    names = {host, *case.get("here", ())}
    files: dict[str, str] = case.get("files", {})

    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return files[path]

    return Probes(
        hostname=host,
        is_here=lambda name: name in names,
        is_ancestor=lambda pid: None if above is None else pid in above,
        is_under=lambda commands: (
            None if above is None else any(name in above for name in commands)
        ),
        is_open=lambda descriptor: descriptor in case.get("open", ()),
        accepts_connections=lambda address, port: port in case.get("listening", ()),
        option_above=lambda commands, option: str(case.get("words", {}).get(option, "")),
        peer_above=lambda commands, descriptor: str(case.get("peers", {}).get(descriptor, "")),
        read_file=read,
    )


def environ_of(case: dict[str, Any]) -> dict[str, str]:
    """
    Return the environment of a case, a recording's task under ``recorded: [file, task]`` included.
    """
    environ: dict[str, str] = {}
    if "recorded" in case:
        name, task = case["recorded"]
        environ = dict(recorded(name)[task][0])
    return environ | {name: str(value) for name, value in case.get("environ", {}).items()}


def format_outcome(case: dict[str, Any]) -> str:
    """Return what is found, as text, or the error."""
    try:
        found = detect_launcher(environ_of(case), probes(case), case.get("launcher", ""))
    except PdrunError as error:
        return f"exit {error.exit_code}\npdrun: error: {error}\n"
    return found_text(found)


def found_text(found: LauncherInfo) -> str:
    """Return a finding as lines, each value with its source; what is not known is left out."""
    lines = [f"{found.launcher}: {found.title} ({found.kind})"]
    for field in fields(LauncherInfo):
        value = getattr(found, field.name)
        if field.name in ("launcher", "title", "kind", "sources", "ignored", "notes") or value in (
            None,
            "",
            (),
        ):
            continue
        if value is False:
            continue
        if field.name == "attempt" and not value:
            continue
        if field.name == "hosts":
            value = " ".join(
                host.name if host.slots is None else f"{host.name}:{host.slots}" for host in value
            )
        source = found.sources.get(field.name, "")
        lines.append(f"{field.name:<10} {value}" + (f"   ({source})" if source else ""))
    lines += [f"ignored    {item.launcher}: {item.why}" for item in found.ignored]
    lines += [f"note       {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def load_case(path: Path) -> dict[str, Any]:
    """Read a case."""
    case: dict[str, Any] = yaml.load(path.read_text(), LOADER)  # noqa: S506 - a safe loader
    return case


def rewrite_case(path: Path, text: str) -> None:
    """Put what came out into a case."""
    head = path.read_text().partition(MARK)[0]
    path.write_text(head + MARK + "".join(f"  {line}\n" for line in text.splitlines()))
