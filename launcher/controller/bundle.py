"""
``--ship``: pdrun goes along to hosts that lack it, over the same connection, and stays in a private
cache folder.

    ~/.cache/pdrun/ship/DIGEST (0700)    pdrun/ and, where that interpreter lacks them, zmq/ and psutil/

The remote command is fixed: it runs the program that stands in the first line of stdin (`_UNPACK`).
That program says whether it has the cargo already, unpacks it if not, and becomes the far end.
Limit: pyzmq and psutil are compiled; they are taken along only to an interpreter of the same
version, machine and C library as this one, and else must be there.
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

from pdrun.launcher.controller.ssh_agent import RemoteAgent

FOLDERS = ("backends", "launcher", "parallel", "rendezvous", "templates", "ui")
COMPILED = ("zmq", "psutil")
"""
What the agents import that is not pure Python; zmq's own shared libraries lie beside it in
pyzmq.libs.
"""

_UNPACK = r"""
import importlib.util, io, json, os, shutil, stat, sys, sysconfig, tempfile, zipfile
raw = open(0, "rb", 0, closefd=False)
def read(size):
    data = b""
    while len(data) < size:
        more = raw.read(size - len(data))
        if not more: sys.exit(0)
        data += more
    return data
def say(**what):
    os.write(1, b"\0pdrun-ship " + json.dumps(what).encode() + b"\n")
if sys.version_info < (3, 11):
    sys.exit("unknown option: Python 3.11 is needed")
told = json.loads(raw.readline())
kind = "%s %s" % (sys.implementation.cache_tag, sysconfig.get_platform())
lacks = [name for name in told["compiled"] if importlib.util.find_spec(name) is None]
if lacks and kind != told["kind"]:
    sys.exit("far end: pyzmq and psutil are needed there (%s is missing; this is %s, they were built for %s)"
             % (", ".join(lacks), kind, told["kind"]))
base = os.environ.get("XDG_CACHE_HOME", "")
base = base if base.startswith("/") else os.path.expanduser("~/.cache")
ship = os.path.join(base, "pdrun", "ship")
os.makedirs(ship, mode=0o700, exist_ok=True)
def private(path):
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
if not private(ship):
    sys.exit("far end: %s is not a folder of yours alone" % ship)
home = os.path.join(ship, told["digest"])
say(need=not os.path.isdir(home))
if not os.path.isdir(home):
    draft = tempfile.mkdtemp(prefix=".draft-", dir=ship)
    zipfile.ZipFile(io.BytesIO(read(told["size"]))).extractall(draft)
    try:
        os.rename(draft, home)
    except OSError:  # another one was faster
        shutil.rmtree(draft)
paths = [os.path.join(home, "pure")] + ([os.path.join(home, "compiled")] if lacks else [])
old = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(paths + ([old] if old else []))
os.execv(sys.executable, [sys.executable, "-P", "-m", "pdrun.launcher.launch.remote_main"])
"""


@dataclass(frozen=True)
class Cargo:
    """What goes along."""

    archive: bytes
    digest: str
    kind: str
    """
    ``cpython-311 linux-x86_64``: the interpreter and machine for which the compiled part was built.
    """
    compiled: tuple[str, ...]


def cargo() -> Cargo:
    """
    Return this installation of pdrun and the compiled packages that it needs; equal ones have one
    digest.
    """
    root = (
        Path(__file__).resolve().parents[2]
    )  # pdrun/ when installed; the top of the repository when editable
    face = root / "pdrun" if (root / "pdrun" / "__init__.py").exists() else root
    files = {f"pure/pdrun/{path.relative_to(face)}": path for path in _files(face)}
    for folder in FOLDERS:
        files |= {
            f"pure/pdrun/{folder}/{path.relative_to(root / folder)}": path
            for path in _files(root / folder)
        }
    compiled = []
    for name in COMPILED:
        if found := _package(name):
            compiled.append(name)
            for part in (found, found.parent / f"py{name}.libs"):
                files |= {
                    f"compiled/{part.name}/{path.relative_to(part)}": path for path in _files(part)
                }
    archive = _zipped(files)
    kind = f"{sys.implementation.cache_tag} {sysconfig.get_platform()}"
    return Cargo(archive, hashlib.sha256(archive).hexdigest()[:32], kind, tuple(compiled))


def _package(name: str) -> Path | None:
    from importlib.util import find_spec

    spec = find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        parts = path.relative_to(folder).parts
        if (
            path.is_file()
            and not {"__pycache__", "tests", ".git"} & set(parts)
            and path.suffix not in (".pyc", ".pyx")
        ):
            yield path


def _zipped(files: dict[str, Path]) -> bytes:
    """Return an archive that depends on names and contents only."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o600 << 16
            archive.writestr(entry, files[name].read_bytes())
    return data.getvalue()


class ShippingAgent(RemoteAgent):
    """A connection whose far end may have to be brought there first."""

    def __init__(self, node: str, argv: Sequence[str], load: Cargo) -> None:
        super().__init__(node, argv)
        self._load = load
        self._answered = False
        self._folder = ""

    def connect(self, folder: str, first: bytes = b"") -> None:
        """
        Start ssh; the question to the far end waits until it is known whether the cargo is needed.
        """
        told = {
            "digest": self._load.digest,
            "size": len(self._load.archive),
            "kind": self._load.kind,
            "compiled": self._load.compiled,
        }
        head = base64.b64encode(_UNPACK.encode()) + b"\n" + json.dumps(told).encode() + b"\n"
        self._folder = folder
        super().connect(folder, head)

    def check(self, folder: str) -> bytes:
        """Nothing yet: what is sent now might be taken for the cargo."""
        return b""

    def take(self, fd: int) -> Iterator[tuple[int, bytes]]:
        """As ever; and answer the question of `_UNPACK`."""
        yield from super().take(fd)
        for line in () if self._answered else self.asked:
            _, _, text = line.partition(b"\0pdrun-ship ")
            if text:
                self._answered = True
                need = bool(json.loads(text)["need"])
                self.send((self._load.archive if need else b"") + super().check(self._folder))
