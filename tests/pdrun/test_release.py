"""The version of a build: from tags, without tags, without git; and the bill of materials."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pdrun

ROOT = Path(__file__).resolve().parents[2]
find_version = runpy.run_path(str(ROOT / "setup.py"))["find_version"]
Commit = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pdrun").mkdir()
    (tmp_path / "pdrun/__init__.py").write_text('__version__ = "0.1.0"\n')
    return tmp_path


@pytest.fixture
def commit(tree: Path) -> Commit:
    """A repository with one commit; each call makes another one, with a tag."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    def make(tag: str = "") -> None:
        git("commit", "-q", "--allow-empty", "-m", "more")
        if tag:
            git("tag", tag)

    git("init", "-q")
    git("add", ".")
    make()
    return make


def test_without_git_the_package_says_it(tree: Path) -> None:
    assert find_version(tree) == "0.1.0"


def test_inside_another_repository_its_tags_do_not_count(tree: Path, commit: Commit) -> None:
    commit("v9.0.0")
    inner = tree / "unpacked"
    (inner / "pdrun").mkdir(parents=True)
    (inner / "pdrun/__init__.py").write_text('__version__ = "0.1.0"\n')
    assert find_version(inner) == "0.1.0"


def test_without_a_tag_commits_are_counted(tree: Path, commit: Commit) -> None:
    commit()
    assert re.fullmatch(r"0\.1\.0\.dev2\+g[0-9a-f]+", find_version(tree))


@pytest.mark.parametrize(
    ("tag", "exact", "later"),
    [
        ("v0.1.0", "0.1.0", r"0\.1\.1\.dev1\+g[0-9a-f]+"),
        ("v0.0.7", "0.0.7", r"0\.1\.0\.dev1\+g[0-9a-f]+"),
        ("v1.2", "1.2", r"1\.2\.1\.dev1\+g[0-9a-f]+"),
        ("v0.2.0rc1", "0.2.0rc1", r"0\.2\.1\.dev1\+g[0-9a-f]+"),
    ],
)
def test_a_tag_is_the_version(tree: Path, commit: Commit, tag: str, exact: str, later: str) -> None:
    commit(tag)
    assert find_version(tree) == exact
    commit("not-a-version")
    assert re.fullmatch(later, find_version(tree))


def test_edits_are_not_the_tagged_version(tree: Path, commit: Commit) -> None:
    commit("v0.1.0")
    (tree / "pdrun/__init__.py").write_text('__version__ = "0.1.0"\nx = 1\n')
    assert re.fullmatch(r"0\.1\.1\.dev0\+g[0-9a-f]+\.dirty", find_version(tree))


def test_this_tree_has_a_version() -> None:
    assert find_version().startswith(pdrun.__version__) or (ROOT / ".git").exists()


def test_the_bill_names_all_that_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/sbom")], capture_output=True, text=True, timeout=60
    )
    if "is not installed" in done.stderr:
        pytest.skip("pdrun is not installed")
    bill = json.loads(done.stdout)
    names = {part["name"] for part in bill["components"]}
    assert {"click", "rich", "pyzmq", "psutil", "pyyaml", "cloudpickle"} <= names
    assert "torch" not in names, "it is an extra"
    assert all(
        part["version"] and part["purl"].startswith("pkg:pypi/") for part in bill["components"]
    )
    known = {part["bom-ref"] for part in bill["components"]}
    own = bill["metadata"]["component"]["bom-ref"]
    for row in bill["dependencies"]:
        assert row["ref"] in known | {own} and set(row["dependsOn"]) <= known


def test_the_matrix_names_every_pair() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/matrix"), "--list"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 16 and lines[0].startswith("python 3.11, torch 2.11: ")
    own = ".".join(map(str, sys.version_info[:2]))
    here = [line for line in lines if line.startswith(f"python {own},")]
    assert all("missing" not in line for line in here if sys.prefix == sys.base_prefix)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_another_python_passes() -> None:
    """Those that this machine has; torch is installed for each."""
    own = ".".join(map(str, sys.version_info[:2]))
    others = [name for name in ("3.11", "3.12", "3.13", "3.14") if name != own]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/matrix"), "--torch", "2.13", "--python"]
        + [",".join(others), "--", "tests/pdrun/test_release.py", "-n", "0"],
        capture_output=True,
        text=True,
        timeout=1700,
    )
    if ": ok: " not in done.stdout and "FAILED" not in done.stdout:
        pytest.skip(f"no other Python with torch: {done.stdout}")
    assert done.returncode == 0, done.stdout
