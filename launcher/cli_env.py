"""``pdrun env``: what this machine and its environment mean to pdrun; starts nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from pdrun.errors import PdrunError
from pdrun.launcher import facts, network, show
from pdrun.launcher.derive import build
from pdrun.launcher.placement import place
from pdrun.launcher.wishes import Level, Source, Wish, from_environment


def report(environ: Mapping[str, str]) -> str:
    """Return the report; an environment that contradicts itself is a line of it, not an end."""
    here = Source("pdrun env", Level.COMMAND)
    program = [
        Wish("program.target", "true", here), Wish("program.kind", "command", here), Wish("program.args", (), here)
    ]  # fmt: skip
    trouble = ""
    try:
        said, notes = from_environment(environ)
        asked = build([*program, *said], notes)
    except PdrunError as error:
        trouble = str(error)
        asked = build(program)
    found = facts.gather(asked.spec, environ)
    found = facts.with_network(found, network.addresses(), network.route(asked.spec.place.scheduler))
    try:
        placement = place(asked.spec, found, asked.sources)
        chosen = f"{placement.backend.name}: {placement.workers} worker(s) a node by default"
    except PdrunError as error:
        chosen = f"nothing: {error}"
    text = show.environment_text(found, chosen)
    lines = [f"  {note}" for note in asked.notes] + ([f"  error: {trouble}"] if trouble else [])
    return text + ("\nnotes:\n" + "\n".join(lines) + "\n" if lines else "")
