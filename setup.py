"""
The version of a build: from git's tags, or what `pdrun.__version__` says where there is no git.

    v0.2.0 is tagged here        0.2.0
    5 commits after it           0.2.1.dev5+g1a2b3c4, or what `pdrun/__init__.py` says if newer
    no tag                       0.1.0.dev737+g1a2b3c4: base and number of commits
    an sdist, a tree without git what `pdrun/__init__.py` says; builds write their version there

Everything else is in pyproject.toml.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INIT = "pdrun/__init__.py"
ASSIGNMENT = re.compile(r'^__version__ = "([^"]+)"$', re.M)
GIT_SECONDS = 20


def find_version(root: Path = ROOT) -> str:
    """Return the version of a source tree."""
    found = ASSIGNMENT.search((root / INIT).read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{root / INIT}: there must be a line __version__ = ...")
    base = found[1]
    if not (root / ".git").exists():
        return base  # maybe inside another repository, whose tags are not ours
    described = _ask_git(root, "describe", "--tags", "--match", "v[0-9]*", "--long", "--dirty")
    tagged = re.fullmatch(r"v([0-9]+(?:\.[0-9]+)*\S*)-([0-9]+)-(g[0-9a-f]+)(-dirty)?", described)
    if tagged is not None:
        tag, count, commit, dirty = tagged.groups()
        if count == "0" and not dirty:
            return tag
        base = max(base, _next_patch(tag), key=_release)
    else:
        count = _ask_git(root, "rev-list", "--count", "HEAD")
        commit = f"g{_ask_git(root, 'rev-parse', '--short', 'HEAD')}"
        dirty = _ask_git(root, "status", "--porcelain", "--untracked-files=no")
        if not count:
            return base
    return f"{base}.dev{count}+{commit}{'.dirty' if dirty else ''}"


def _ask_git(root: Path, *words: str) -> str:
    """Return what git prints; empty if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _next_patch(version: str) -> str:
    numbers = [*_release(version), 0, 0][:3]
    return f"{numbers[0]}.{numbers[1]}.{numbers[2] + 1}"


def write_version(file: Path, version: str) -> None:
    """Make a copy of `pdrun/__init__.py` say the version of the build."""
    text = file.read_text(encoding="utf-8")
    file.unlink()  # it may be a hard link to the source
    file.write_text(ASSIGNMENT.sub(f'__version__ = "{version}"', text), encoding="utf-8")


def main() -> None:
    """Build."""
    from setuptools import setup
    from setuptools.command.build_py import build_py
    from setuptools.command.sdist import sdist

    version = find_version()

    class BuildPackages(build_py):
        """Copies the packages."""

        def run(self) -> None:
            """Copy, then write the version."""
            super().run()
            target = Path(self.build_lib, INIT)
            if not self.editable_mode and target.exists():
                write_version(target, version)

    class SourceArchive(sdist):
        """Makes the source archive."""

        def make_release_tree(self, base_dir: str, files: list[str]) -> None:
            """Copy, then write the version."""
            super().make_release_tree(base_dir, files)
            write_version(Path(base_dir, INIT), version)

    setup(version=version, cmdclass={"build_py": BuildPackages, "sdist": SourceArchive})


if __name__ == "__main__":
    main()
