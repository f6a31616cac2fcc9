"""
Where log files are and what they are called: the log folder, and file names from a checked
template.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pdrun.disk import open_folder
from pdrun.errors import ConfigError, did_you_mean

TEMPLATE_FIELDS = ("rank", "local_rank", "node", "ip", "hostname")
OUT_SUFFIX = ".out"
ERR_SUFFIX = ".err"
MAX_TEMPLATE_CHARACTERS = 200


def prepare_log_folder(root: Path) -> None:
    """
    Make the log folder before anything is started.

    A new folder has mode 0700, and a .gitignore for its content.

    Raises:
        ConfigError: it is not a folder, belongs to another user, or cannot be made or written.
    """
    try:
        made = not root.is_dir()
        fd = open_folder(root)
        try:
            if made or _is_new_run_folder(root):
                _write_gitignore(fd)
        finally:
            os.close(fd)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot be used for logs: {reason}", where=str(root), hint="use --log-dir FOLDER"
        ) from error


def _write_gitignore(folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(".gitignore", flags, 0o600, dir_fd=folder)
    except FileExistsError:
        return
    with open(fd, "w", encoding="utf-8") as file:
        file.write("*\n")


def _is_new_run_folder(root: Path) -> bool:
    """Return whether a folder contains one run's event log only: then it was made a moment ago."""
    inside = list(root.iterdir())
    return (
        len(inside) == 1
        and (inside[0] / "events.jsonl").is_file()
        and len(list(inside[0].iterdir())) == 1
    )


def check_template(template: str) -> str:
    """
    Return a file name template with one file per rank: ``_{rank}`` is added if it is needed.

    Raises:
        ConfigError: an unknown field, a stray brace, or a name outside the log folder.
    """
    where = "log name"
    for name in re.findall(r"\{([^{}]*)\}", template):
        if name not in TEMPLATE_FIELDS:
            known = ", ".join(f"{{{field}}}" for field in TEMPLATE_FIELDS)
            hint = did_you_mean(name, TEMPLATE_FIELDS) or f"use {known}"
            raise ConfigError(f"unknown field {{{name}}}", where=where, hint=hint)
    if re.search(r"[{}]", re.sub(r"\{[a-z_]+\}", "", template)):
        raise ConfigError(f"{template!r} has a stray brace", where=where)
    has_empty_part = any(part in ("", ".", "..") for part in template.split("/"))
    if has_empty_part or not template.isprintable() or len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(f"{template!r} is not a file name inside the log folder", where=where)
    if "{rank}" in template or ("{local_rank}" in template and "{node}" in template):
        return template
    return template + "_{rank}"


def fill_template(
    template: str, *, rank: int, local_rank: int, node: str, ip: str = "", hostname: str = ""
) -> str:
    """Return the file name, without suffix, of a worker; a value cannot add a folder."""
    values = {"rank": rank, "local_rank": local_rank, "node": node, "ip": ip, "hostname": hostname}

    def fill_field(match: re.Match[str]) -> str:
        return _safe_part(str(values[match.group(1)]))

    return re.sub(r"\{([a-z_]+)\}", fill_field, check_template(template))


def rank_pattern(template: str) -> re.Pattern[str]:
    """
    Return a pattern for the names that `fill_template` makes.

    The group ``rank`` is the rank, if the template contains it.
    """
    text = ""
    has_rank = False
    for part in re.split(r"(\{[a-z_]+\})", check_template(template)):
        if part == "{rank}" and not has_rank:
            text += "(?P<rank>[0-9]+)"
            has_rank = True
        else:
            text += "[^/]+?" if part.startswith("{") else re.escape(part)
    return re.compile(text)


def _safe_part(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:-]", "_", value).lstrip(".") or "_"
