"""
Where logs lie and what they are called: the root folder, and file names from a template, safe by
construction.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pdrun.errors import ConfigError, did_you_mean
from pdrun.disk import make_private_folder

TEMPLATE_FIELDS = ("rank", "local_rank", "node", "ip", "hostname")
OUT_SUFFIX = ".out"
ERR_SUFFIX = ".err"


def prepare_log_folder(root: Path) -> None:
    """
    Make the folder for logs, or find out that it cannot be used, before anything is started.

    A folder that is made here is 0700 and keeps itself out of git.

    Raises:
        ConfigError: it is no folder, or cannot be made or written; names it.
    """
    try:
        made = not root.is_dir()
        if made:
            make_private_folder(root)
        if made or _is_new_run_folder(root):
            (root / ".gitignore").write_text("*\n")
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot hold the logs: {reason}", where=str(root), hint="use --log-dir FOLDER"
        ) from error


def _is_new_run_folder(root: Path) -> bool:
    """
    Whether all that a folder holds is one run's event log: it was made for that, a moment ago.
    """
    inside = list(root.iterdir())
    return (
        len(inside) == 1
        and (inside[0] / "events.jsonl").is_file()
        and len(list(inside[0].iterdir())) == 1
    )


def check_template(template: str) -> str:
    """
    Return a usable file name template: ``template``, with ``_{rank}`` added where nothing in it
    tells ranks apart.

    Raises:
        ConfigError: it names an unknown field, has a stray brace, or would leave the log folder.
    """
    where = "log name"
    for name in re.findall(r"\{([^{}]*)\}", template):
        if name not in TEMPLATE_FIELDS:
            hint = did_you_mean(name, TEMPLATE_FIELDS) or "use " + ", ".join(
                f"{{{known}}}" for known in TEMPLATE_FIELDS
            )
            raise ConfigError(f"unknown field {{{name}}}", where=where, hint=hint)
    if re.search(r"[{}]", re.sub(r"\{[a-z_]+\}", "", template)):
        raise ConfigError(f"{template!r} has a stray brace", where=where)
    parts = template.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or not template.isprintable()
        or len(template) > 200
    ):
        raise ConfigError(f"{template!r} is no file name inside the log folder", where=where)
    apart = "{rank}" in template or ("{local_rank}" in template and "{node}" in template)
    return template if apart else template + "_{rank}"


def fill_template(
    template: str, *, rank: int, local_rank: int, node: str, ip: str = "", hostname: str = ""
) -> str:
    """Fill in a template that `check_template` passes; a value cannot add a folder of its own."""
    values = {"rank": rank, "local_rank": local_rank, "node": node, "ip": ip, "hostname": hostname}
    return re.sub(
        r"\{([a-z_]+)\}",
        lambda match: _safe_part(str(values[match.group(1)])),
        check_template(template),
    )


def rank_pattern(template: str) -> re.Pattern[str]:
    """
    Return a pattern that finds the rank (group ``rank``) in a name that `file_stem` made, where it
    holds one.
    """
    text = ""
    seen = False
    for part in re.split(r"(\{[a-z_]+\})", check_template(template)):
        if part == "{rank}" and not seen:
            text = text + "(?P<rank>[0-9]+)"
            seen = True
        else:
            text += "[^/]+?" if part.startswith("{") else re.escape(part)
    return re.compile(text)


def _safe_part(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:-]", "_", value).lstrip(".") or "_"
