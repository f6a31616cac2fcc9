"""
``--ship``: sends pdrun to hosts that lack it, into a private cache folder there.

    ~/.cache/pdrun/ship/DIGEST (0700)    pdrun/, and zmq/ and psutil/ if that interpreter lacks them

The remote command is fixed: it runs the program in the first line of stdin (`_UNPACK`). That
program answers whether it has the bundle already, unpacks it if not, and becomes the remote server.

Limit: pyzmq and psutil are compiled. They are sent only to an interpreter of the same version,
machine and C library as this one; other hosts need them installed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdrun.launcher.controller.ssh_agent import RemoteAgentHandle

FOLDERS = ("backends", "launcher", "parallel", "rendezvous", "templates", "ui")
COMPILED_PACKAGES = ("zmq", "psutil")
"""
Packages of the agents that are not pure Python; zmq has shared libraries in pyzmq.libs.
"""
SKIPPED_FOLDERS = {"__pycache__", "tests", ".git"}
SKIPPED_SUFFIXES = (".pyc", ".pyx")

_UNPACK = r"""
import importlib.util, io, json, os, shutil, stat, sys, sysconfig, tempfile, zipfile
raw = open(0, "rb", 0, closefd=False)
def read_bytes(size):
    data = b""
    while len(data) < size:
        more = raw.read(size - len(data))
        if not more: sys.exit(0)
        data += more
    return data
def send(**answer):
    os.write(1, b"\0pdrun-ship " + json.dumps(answer).encode() + b"\n")
if sys.version_info < (3, 11):
    sys.exit("unknown option: Python 3.11 is needed")
bundle = json.loads(raw.readline())
kind = "%s %s" % (sys.implementation.cache_tag, sysconfig.get_platform())
missing = [name for name in bundle["compiled"] if not importlib.util.find_spec(name)]
if missing and kind != bundle["kind"]:
    sys.exit("remote side: pyzmq and psutil must be installed there "
             "(%s is missing; this is %s, they were built for %s)"
             % (", ".join(missing), kind, bundle["kind"]))
base = os.environ.get("XDG_CACHE_HOME", "")
base = base if base.startswith("/") else os.path.expanduser("~/.cache")
ship = os.path.join(base, "pdrun", "ship")
os.makedirs(ship, mode=0o700, exist_ok=True)
def is_private(path):
    found = os.lstat(path)
    is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return stat.S_ISDIR(found.st_mode) and is_own
if not is_private(ship):
    sys.exit("remote side: %s must be a folder that only you can write" % ship)
home = os.path.join(ship, bundle["digest"])
send(need=not os.path.isdir(home))
if not os.path.isdir(home):
    draft = tempfile.mkdtemp(prefix=".draft-", dir=ship)
    zipfile.ZipFile(io.BytesIO(read_bytes(bundle["size"]))).extractall(draft)
    try:
        os.rename(draft, home)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
paths = [os.path.join(home, "pure")] + ([os.path.join(home, "compiled")] if missing else [])
old = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(paths + ([old] if old else []))
os.execv(sys.executable, [sys.executable, "-P", "-m", "pdrun.launcher.launch.remote_main"])
"""


@dataclass(frozen=True)
class Bundle:
    """An archive of pdrun and its compiled packages."""

    archive: bytes
    digest: str
    kind: str
    """``cpython-311 linux-x86_64``: interpreter and machine of the compiled packages."""
    compiled: tuple[str, ...]


def build_bundle() -> Bundle:
    """
    Return this installation of pdrun and the compiled packages that it needs.

    Equal installations have equal digests.
    """
    # pdrun/ if installed; the top of the repository if editable
    root = Path(__file__).resolve().parents[2]
    package = root / "pdrun" if (root / "pdrun" / "__init__.py").exists() else root
    files = {f"pure/pdrun/{path.relative_to(package)}": path for path in _list_files(package)}
    for folder in FOLDERS:
        for path in _list_files(root / folder):
            files[f"pure/pdrun/{folder}/{path.relative_to(root / folder)}"] = path
    compiled = []
    for name in COMPILED_PACKAGES:
        found = _find_package(name)
        if found is None:
            continue
        compiled.append(name)
        for part in (found, found.parent / f"py{name}.libs"):
            for path in _list_files(part):
                files[f"compiled/{part.name}/{path.relative_to(part)}"] = path
    archive = _zip_files(files)
    kind = f"{sys.implementation.cache_tag} {sysconfig.get_platform()}"
    return Bundle(archive, hashlib.sha256(archive).hexdigest()[:32], kind, tuple(compiled))


def _find_package(name: str) -> Path | None:
    from importlib.util import find_spec

    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _list_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*")):
        is_skipped = SKIPPED_FOLDERS & set(path.relative_to(folder).parts)
        if path.is_file() and not is_skipped and path.suffix not in SKIPPED_SUFFIXES:
            yield path


def _zip_files(files: dict[str, Path]) -> bytes:
    """Return an archive that depends only on names and contents."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, files[name].read_bytes())
    return data.getvalue()


class BundledAgentHandle(RemoteAgentHandle):
    """A connection to a host that may lack pdrun: the bundle is sent first."""

    def __init__(self, node: str, argv: Sequence[str], bundle: Bundle) -> None:
        super().__init__(node, argv)
        self._bundle = bundle
        self._is_answered = False
        self._folder = ""

    def connect(self, folder: str, first: bytes = b"") -> None:
        """Start ssh and `_UNPACK`; wait for its answer before sending more."""
        header = {
            "digest": self._bundle.digest,
            "size": len(self._bundle.archive),
            "kind": self._bundle.kind,
            "compiled": self._bundle.compiled,
        }
        program = base64.b64encode(_UNPACK.encode())
        self._folder = folder
        super().connect(folder, program + b"\n" + json.dumps(header).encode() + b"\n")

    def first_question(self, folder: str) -> bytes:
        """Return nothing: `_UNPACK` would read it as a part of the bundle."""
        return b""

    def read_output(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """See `AgentHandle`; also sends the bundle when `_UNPACK` asks for it."""
        yield from super().read_output(fd)
        if self._is_answered:
            return
        for line in self.text_lines:
            _, _, text = line.partition(b"\0pdrun-ship ")
            if text:
                self._is_answered = True
                archive = self._bundle.archive if json.loads(text)["need"] else b""
                self.send_bytes(archive + super().first_question(self._folder))
