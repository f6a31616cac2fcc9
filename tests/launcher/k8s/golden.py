"""
Cases of manifests: ``cases.txt`` has command lines, ``cases/NAME.yaml`` what comes out.

``PDRUN_GOLDEN=write pytest tests/launcher/k8s`` writes the files, for reading in a review.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from pdrun.launcher.cli.clusters.k8s_request import read_request
from pdrun.launcher.k8s.manifest import format_manifests
from pdrun.launcher.k8s.pod import Manifest

FOLDER = Path(__file__).parent
TOKEN = "pdrun1-TOKEN"


def read_cases() -> dict[str, list[str]]:
    """Return name -> words of every case."""
    lines = (FOLDER / "cases.txt").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: shlex.split(words) for name, _, words in pairs}


def read_refusals() -> Iterator[tuple[str, int, str]]:
    """Yield (words, exit code, message) of every command line that is refused."""
    lines = (FOLDER / "refused.txt").read_text().splitlines()[1:]
    for words, text in zip(lines[::2], lines[1::2], strict=True):
        code, _, message = text.strip().partition(" ")
        yield words, int(code), message


def make_case(words: list[str]) -> list[Manifest]:
    """Return the manifests of a command line, read in the folder of the files."""
    with chdir(FOLDER / "files"):
        return read_request(words).make_manifests(TOKEN)


def format_case(words: list[str]) -> str:
    """Return the manifests as YAML."""
    return format_manifests(make_case(words))
