"""The command line as a real process: what a user's shell sees, with a bound on time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.timing import in_starts

BOUND = 60
"""
Starts of a bare interpreter that a mistake may cost: less than a second where nothing else runs.
"""


def pdrun(
    *argv: str | bytes, cwd: Path, env: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pdrun", *argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done, time.monotonic() - start


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--nodes", "x", "train.py"], 2, "--nodes: 'x' is not a whole number"),
        (["nope.py"], 2, "no such file 'nope.py'"),
        (["--nodes", "2", "--scheduler", "host", "train.py"], 2, "has no port"),
        (["job.yaml"], 78, "job.yaml:2: unknown key"),
        (["--nodez", "2", "train.py"], 2, "did you mean '--nodes'?"),
    ],
)
def test_a_mistake_costs_one_line_and_less_than_a_second(
    tmp_path: Path, argv: list[str], code: int, message: str
) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    (tmp_path / "job.yaml").write_text("job: x\nnodez: 2\n")

    def mistake() -> float:
        done, took = pdrun(*argv, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        assert [message in line for line in done.stderr.splitlines()] == [True]
        return took

    assert in_starts(mistake, BOUND) < BOUND
    assert not (tmp_path / "started").exists()


CLOSED = [
    (
        ["--python", "closed/python", "train.py"],
        126,
        "--python: 'closed/python' cannot be accessed: Permission denied",
    ),
    (["--no-python", "closed/tool"], 126, "'closed/tool' cannot be accessed: Permission denied"),
    (
        ["--chdir", "closed/there", "train.py"],
        2,
        "--chdir: 'closed/there' cannot be accessed: Permission denied",
    ),
    (
        ["--nodes", "2", "--scheduler", "127.0.0.1:0", "--token-file", "closed/token", "train.py"],
        78,
        "--token-file closed/token: cannot be read: Permission denied",
    ),
    (
        ["--hostfile", "closed/hosts", "train.py"],
        2,
        "--hostfile closed/hosts: cannot be read: Permission denied",
    ),
    (["--log-dir", "closed/logs", "train.py"], 78, "--log-dir: 'closed/logs' cannot be written: "),
    (
        ["checkpoint", "show", "closed/saved"],
        78,
        "closed/saved: cannot be used: Permission denied",
    ),
]


@pytest.mark.parametrize(
    ("argv", "code", "message"), CLOSED, ids=lambda value: value[0] if type(value) is list else ""
)
def test_a_closed_folder_is_reported_as_the_users_error(
    tmp_path: Path, argv: list[str], code: int, message: str
) -> None:
    if argv[0] == "checkpoint":
        pytest.importorskip("torch")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may go everywhere; needs setpriv (util-linux)")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "closed").mkdir(mode=0)
    common = (
        ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    )
    done = subprocess.run(
        [*common, sys.executable, "-m", "pdrun", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    (tmp_path / "closed").chmod(0o700)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"pdrun: error: {message}") and done.stderr.count("\n") == 1


def test_words_that_are_no_text_are_shown_and_what_a_shell_is_to_run_holds_their_bytes(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.py").write_text("import os\nos.putenv(b'\\xff', b'x')\nimport torch\n")
    strict = {"PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"}
    for words in (["--dry-run"], ["--dry-run", "--json"], ["--dry-run", "--explain"]):
        done, _ = pdrun(*words, "one.py", b"\xff", cwd=tmp_path, env=strict)
        assert (done.returncode, "udcff" in done.stdout) == (0, True), done.stderr
    command = [sys.executable, "-m", "pdrun", "slurm", "render", "one.py", b"\xff"]
    rendered = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **strict}, capture_output=True, timeout=60
    )
    assert rendered.returncode == 0 and b"one.py '\xff'" in rendered.stdout, rendered.stderr


def test_a_token_that_finds_no_room_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "pdrun.sh").write_text(
        f"ulimit -f 0\nexec {sys.executable} -m pdrun token create token\n"
    )
    done = subprocess.run(
        ["sh", "pdrun.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "error: token: cannot be written: File too large" in done.stderr
    assert not (tmp_path / "token").exists()
    done, _ = pdrun("token", "create", "token", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "token").read_text().startswith("pdrun1-")


def test_a_users_json_module_is_not_ours(tmp_path: Path) -> None:
    for name in (
        "json",
        "dataclasses",
        "click_extra",
        "difflib",
        "resource",
        "signal",
        "socket",
        "ast",
        "selectors",
    ):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user has this file')\n")
    (tmp_path / "train.py").write_text("")
    done, _ = pdrun("--dry-run", "train.py", cwd=Path("/"), env={"PYTHONPATH": str(tmp_path)})
    assert "no such file 'train.py'" in done.stderr
    done, _ = pdrun(
        "--dry-run", str(tmp_path / "train.py"), cwd=Path("/"), env={"PYTHONPATH": str(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_paths_beyond_ascii_in_the_c_locale(tmp_path: Path) -> None:
    folder = tmp_path / "données-数据"
    folder.mkdir()
    (folder / "entraîner.py").write_text("")
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done, _ = pdrun("--dry-run", "entraîner.py".encode(), cwd=folder, env=plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "job        entra-ner-" in done.stdout
    done, _ = pdrun("manque-é.py".encode(), cwd=folder, env=plain)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, "-m", "pdrun", "run", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("was_warm", [False, True], ids=["never warm", "was warm once"])
def test_neither_torch_nor_anything_slow_is_loaded(tmp_path: Path, was_warm: bool) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    if was_warm:  # `pdrun warm start` has made the folder; its process has ended
        (tmp_path / "runtime" / "pdrun").mkdir(mode=0o700, parents=True)
    program = (
        "import sys; from pdrun.launcher.cli import main as cli; code = cli.main(['--dry-run', 'train.py']);"
        "heavy = {'torch', 'numpy', 'zmq', 'rich', 'yaml', 'psutil', 'asyncio', 'socket', 'importlib.metadata'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_the_token_is_made_once_and_never_shown_by_create(tmp_path: Path) -> None:
    done, _ = pdrun("token", "create", "job.token", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    text = (tmp_path / "job.token").read_text()
    assert text.startswith("pdrun1-")
    assert text.strip() not in done.stderr
    assert (tmp_path / "job.token").stat().st_mode & 0o777 == 0o600
    shown, _ = pdrun("token", "show", "--token-file", "job.token", cwd=tmp_path)
    assert shown.stdout == text
    again, _ = pdrun("token", "create", "job.token", cwd=tmp_path)
    assert again.returncode == 2
    assert (tmp_path / "job.token").read_text() == text


@pytest.mark.parametrize(
    "text", ["", "x", "pdrun1-AAAA", "pdrun1-AAAA-BBBB-00000000", "pdrun2-a-b-c"]
)
def test_a_bad_token_is_refused_before_anything_listens(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    done, _ = pdrun(
        "--nodes",
        "2",
        "--scheduler",
        "127.0.0.1:1",
        "--serve",
        "train.py",
        cwd=tmp_path,
        env={"PDRUN_TOKEN": text},
    )
    assert done.returncode == 78
    assert "PDRUN_TOKEN" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "started").exists()
