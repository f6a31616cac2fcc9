"""
A forked worker is what ``python SCRIPT`` would have been: the same program both ways, the same
outcome.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from pdrun.launcher.plan.start_method import BASE_MODULES
from tests.launcher.stdlib_only.conftest import Bench
from tests.lib.tiers import by_tier, thorough

FORKED = "import gc, sys\nassert gc.get_freeze_count() > 10000 and 'torch' in sys.modules\n"
"""First lines of a program that would fail were it not forked."""

IDENTITY = """
import MODULES
import sys, os, json, signal, builtins, warnings, faulthandler, threading, locale
import __main__ as m
def status(name):
    return next(l.split()[1] for l in open('/proc/self/status') if l.startswith(name))
print(json.dumps(dict(
  argv=sys.argv, orig=sys.orig_argv, path=sys.path, name=__name__, file=__file__, spec=repr(__spec__),
  loader=[type(__loader__).__module__, type(__loader__).__name__, __loader__.name, __loader__.path],
  package=__package__, doc=__doc__, cached=__cached__, builtins=__builtins__ is builtins, same=m is sys.modules['__main__'],
  names=sorted(n for n in vars(m) if n.startswith('__')), flags=repr(sys.flags), executable=sys.executable,
  env={k: v for k, v in os.environ.items()}, order=list(os.environ), cwd=os.getcwd(), umask=os.umask(0o22),
  streams=[[s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering, s.write_through, type(s.buffer).__name__,
    s.isatty(), s.fileno()] for s in (sys.stdin, sys.stdout, sys.stderr)],
  raw=[s is d for s, d in ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))],
  signals={s.name: str(signal.getsignal(s)).partition(' at ')[0] for s in signal.Signals},
  ignored=status('SigIgn'), blocked=status('SigBlk'), caught=status('SigCgt'), threads=threading.active_count(),
  main=threading.current_thread() is threading.main_thread(), filters=[str(f) for f in warnings.filters],
  fault=faulthandler.is_enabled(), sid=os.getsid(0) == os.getpid(), cpus=sorted(os.sched_getaffinity(0)),
  hooks=[sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__], trace=sys.gettrace(),
  fds=sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')),
  comm=open('/proc/self/comm').read(), cmdline=open('/proc/self/cmdline', 'rb').read().rstrip(b'\\0').decode(),
  limit=sys.getrecursionlimit(), switch=sys.getswitchinterval(), gc=[__import__('gc').isenabled(), __import__('gc').get_threshold()],
  locale=locale.getpreferredencoding(False), main_globals=globals() is vars(m),
)))
"""


def identity(bench: Bench) -> str:
    """
    The program, which imports what the starter has (warnings' filters, for one, come with that).
    """
    return IDENTITY.replace("MODULES", ", ".join(bench.modules))


@pytest.mark.parametrize("bench", ["cold", thorough("warm")], indirect=True)
def test_the_process_itself(bench: Bench, script: Path) -> None:
    script.write_text(identity(bench))
    cpu = min(os.sched_getaffinity(0))
    env = {"ODD": "\u00e9=\n", "PYTHONFAULTHANDLER": "", "RANK": "3"}
    forked, executed = bench.both(
        str(script), "a b", "", cwd=str(script.parent), env=env, cpus=(cpu,)
    )
    assert (forked.code, forked.err) == (0, "") == (executed.code, executed.err)
    one, two = json.loads(forked.out), json.loads(executed.out)
    for side in (one, two):
        side["env"].pop("PDRUN_WORKER_OF")
    assert one == two


@pytest.mark.parametrize(
    "typed", ["prog.py", "./prog.py", "sub/../prog.py", "{folder}/prog.py", "link.py"]
)
def test_paths_are_as_typed(bench: Bench, script: Path, typed: str) -> None:
    program = "import json, sys\nprint(json.dumps([sys.argv, sys.path, __file__]))"
    script.write_text(program)
    (script.parent / "sub").mkdir()
    (script.parent / "other").mkdir()
    (script.parent / "other" / "real.py").write_text(program)
    (script.parent / "link.py").symlink_to("other/real.py")
    forked, executed = bench.both(typed.format(folder=script.parent), "x", cwd=str(script.parent))
    assert (forked.code, forked.err) == (0, "") == (executed.code, executed.err)
    assert json.loads(forked.out) == json.loads(executed.out)


@pytest.mark.parametrize(
    ("bench", "target"),
    [
        ("warm", "pkg.inner"),
        thorough("cold", "alone"),
        thorough("warm", "pkg"),
        thorough("cold", "pkg.inner"),
        thorough("cold", "pkg"),
        thorough("warm", "alone"),
    ],
    indirect=["bench"],
)
def test_modules(bench: Bench, tmp_path: Path, target: str) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    text = (
        identity(bench)
        .replace("__doc__", "str(__spec__.name)")
        .replace("spec=repr(__spec__)", "spec=0")
    )
    (package / "__init__.py").write_text("")
    for path in (package / "inner.py", package / "__main__.py", tmp_path / "alone.py"):
        path.write_text(text)
    forked, executed = bench.both("-m", target, "x", cwd=str(tmp_path))
    one, two = json.loads(forked.out), json.loads(executed.out)
    for side in (one, two):
        side["env"].pop("PDRUN_WORKER_OF")
    assert one == two
    assert forked.code == executed.code == 0


ENDINGS = {
    "exit code": "import sys\nsys.exit(7)",
    "exit text": "import sys\nsys.exit('words')",
    "exit none": "import sys\nsys.exit()",
    "exit object": "import sys\nsys.exit([1, 2])",
    "exception": "def f():\n    1 / 0\n\nf()",
    "chained": "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('boom') from e",
    "context": "try:\n    {}['x']\nexcept KeyError:\n    raise ValueError('boom\\nmore')",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "note": "e = ValueError('x')\ne.add_note('a note')\nraise e",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')",
    "import error": "import no_such_module",
    "syntax": "def broken(:\n    pass",
    "indent": "if 1:\nprint(1)",
    "bytes": b"x = '\xff'\n",
    "null": b"x = 1\0\n",
    "interrupt": "raise KeyboardInterrupt",
    "sigint": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)",
    "sigterm": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(9)"
    ),
    "pipe": (
        "import os, signal\nprint(signal.getsignal(signal.SIGPIPE))\nr, w ="
        " os.pipe()\nos.close(r)\nos.write(w, b'x')"
    ),
    "hook": (
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno, a[2]"
        " is a[1].__traceback__)\n1 / 0"
    ),
    "unraisable": "class A:\n    def __del__(self): raise ValueError('late')\na = A()\ndel a",
    "hard": "import os\nprint('not flushed', end='')\nos._exit(5)",
    "thread": (
        "import threading\ndef f(): raise ValueError('in thread')\nt = threading.Thread(target=f,"
        " name='t')\nt.start()\nt.join()"
    ),
    "assert": "assert 1 == 2, 'no'",
    "warning": (
        "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)"
    ),
    "abort": "import os\nos.abort()",
    "chdir and raise": "import os\nos.chdir('/')\nraise ValueError('after chdir')",
    "deleted stdout": "import sys\ndel sys.stdout\nprint('x')",
    "closed stdout": "import sys\nsys.stdout.close()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_endings_are_byte_for_byte_the_same(bench: Bench, script: Path, ending: str) -> None:
    body = ENDINGS[ending]
    script.write_bytes(body if isinstance(body, bytes) else body.encode() + b"\n")
    names = (script.name, str(script))
    is_cold = bench.modules == BASE_MODULES
    for name in by_tier(names[:1] if is_cold else names[1:], names):
        forked, executed = bench.both(name, cwd=str(script.parent))
        assert (forked.code, forked.out) == (executed.code, executed.out)
        assert re.sub("0x[0-9a-f]+", "", forked.err) == re.sub("0x[0-9a-f]+", "", executed.err)


def test_exceptions_in_modules_have_the_same_traceback(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f():\n    raise ValueError('boom')\nf()\n")
    for target in ("broken", "missing", "no.such"):
        forked, executed = bench.both("-m", target, cwd=str(tmp_path))
        assert (forked.code, forked.err) == (executed.code, executed.err)


LEAVING = """
import atexit, os, sys, threading, time, weakref, tempfile, torch
class Late:
    def __del__(self): os.write(1, b'destroyed\\n')
kept = Late()
gone = weakref.proxy(Late())  # looking at it raises
torch.kept_there = Late() if 0 else None
lost = open('unclosed.txt', 'w')
lost.write('data in a file that nobody closed')
torch.file_of_mine = open('elsewhere.txt', 'w')
torch.file_of_mine.write('kept in a module of the starter')
atexit.register(print, 'handler')
folder = tempfile.TemporaryDirectory()
print(folder.name, file=open('folder.txt', 'w'))
def work():
    time.sleep(0.1)
    os.write(1, b'thread done\\n')
threading.Thread(target=work).start()
sys.stdout.write('half a line')
os.write(2, b'')
"""


def test_leaving_keeps_files_threads_handlers_and_destructors(bench: Bench, script: Path) -> None:
    script.write_text(LEAVING)
    ends = []
    for start in ("fork", "exec"):  # a folder for each: what one left does not stand for the other
        folder = script.parent / start
        folder.mkdir()
        ends.append(bench.run(str(script), start=start, cwd=str(folder)))
        assert (folder / "unclosed.txt").read_text() == "data in a file that nobody closed"
        assert (folder / "elsewhere.txt").read_text() == "kept in a module of the starter"
        assert not Path((folder / "folder.txt").read_text().strip()).exists()
    assert ends[0] == ends[1]
    assert ends[0].code == 0


C_BUFFERS = """
import ctypes
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.printf(b'C buffers too')
libc.fputs(b'and files of C', ctypes.c_void_p(libc.fopen(b'of_c.txt', b'w')))
sys.exit(41)
"""


def test_exit_code_survives_the_short_way_out(bench: Bench, script: Path) -> None:
    """Python itself flushes stdout of C; other files of C are flushed as the process exits."""
    script.write_text(FORKED + C_BUFFERS)
    ended = bench.run(str(script), cwd=str(script.parent))
    assert (ended.code, ended.out, ended.err) == (41, "C buffers too", "")
    assert (script.parent / "of_c.txt").read_text() == "and files of C"


def test_what_cannot_become_a_worker_is_told_as_for_exec(bench: Bench, script: Path) -> None:
    script.write_text("")
    for start in ("fork", "exec"):
        bench.slots += 1
        null = os.open(os.devnull, os.O_RDWR)
        failures = []
        for cwd, cpus in (("/no/such/folder", ()), ("/", (4000,))):
            slot = bench.start(
                (sys.executable, str(script)), null, null, start=start, cwd=cwd, cpus=cpus
            )
            from pdrun.launcher.supervisor.events import SpawnFailed

            failed = bench.driver.wait(SpawnFailed, slot)
            failures.append((failed.errno, failed.message))
        os.close(null)
        assert failures == [
            (2, "/no/such/folder: No such file or directory"),
            (22, "CPUs [4000]: Invalid argument"),
        ]


def test_unbuffered_and_stdin(bench: Bench, script: Path) -> None:
    script.write_text(
        "import os, sys\nprint(repr(sys.stdin.read()))\nsys.stdout.write('x')\nos._exit(0)\n"
    )
    outs = []
    for unbuffered in ("1", ""):
        for start in ("fork", "exec"):
            read, write = os.pipe()
            os.write(write, b"line\r\nlast")
            os.close(write)
            outs.append(
                bench.run(
                    str(script), start=start, env={"PYTHONUNBUFFERED": unbuffered}, stdin=read
                ).out
            )
            os.close(read)
    assert outs == ["'line\\r\\nlast'\nx", "'line\\r\\nlast'\nx", "", ""]
