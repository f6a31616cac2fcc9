"""``pdrun warm`` and the jobs after it, as a user types them; what fits a job as a table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, DeadlineExceeded
from pdrun.launcher.plan.start_method import why_unusable
from pdrun.launcher.supervisor import warm_start
from pdrun.launcher.supervisor.events import WarmProcess
from tests.launcher.plan.test_start_method import FIT, choose
from tests.launcher.stdlib_only.conftest import plain_environment
from tests.launcher.stdlib_only.test_fork_hazards import SLEEPER, pids
from tests.lib.supervisor_driver import is_alive, wait_until
from tests.lib.tiers import thorough

FITTING = WarmProcess(
    socket="/run/x.sock",
    pid=7,
    python="/p/python",
    torch_version="2.13.0",
    modules=("torch", "torch.distributed"),
    variables={
        "HOME": "/h",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": None,
        "TMPDIR": None,
    },
)


@pytest.mark.parametrize(
    ("changes", "more", "why"),
    [
        ({}, {}, ""),
        ({}, {"RANDOM_NAME": "x", "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "8"}, ""),
        ({"python": "/q/python"}, {}, "its interpreter is /q/python"),
        ({"torch_version": "2.12.0"}, {}, "has torch 2.12.0"),
        ({"modules": ("torch",)}, {}, "not imported torch.distributed"),
        ({"unfit": "F has changed since"}, {}, "F has changed"),
        ({}, {"TORCH_LOGS": "x"}, "TORCH_LOGS has another value"),
        ({}, {"TMPDIR": "/x"}, "TMPDIR has another value"),
        ({}, {"HOME": "/i"}, "HOME has another value"),
        ({}, {"PYTHONPATH": "/a:"}, "PYTHONPATH has a relative folder"),
        ({}, {"PYTHONPATH": "/a"}, "PYTHONPATH has another value"),
        ({"depends_on_all": True}, {"RANDOM_NAME": "x"}, "RANDOM_NAME has another value"),
        (
            {"depends_on_all": True},
            {"OLDPWD": "/x", "_": "/bin/pdrun", "SSH_TTY": "/dev/pts/3"},
            "",
        ),
    ],
)
def test_what_fits_a_job(changes: dict, more: dict[str, str], why: str) -> None:
    warm = replace(FITTING, **changes)
    environ = {"HOME": "/h", **more}
    found = why_unusable(
        warm, ("/p/python", "train.py"), ("torch", "torch.distributed"), "2.13.0", environ
    )
    assert why in found and bool(found) == bool(why)
    made = choose(replace(FIT, warm=(warm,)), env=environ)
    assert (made.how, made.warm) == ("fork", "" if why else "/run/x.sock")
    assert why in made.unused and ("warm process 7" in made.reason) == (not why)


def test_functions_and_exec_do_without() -> None:
    assert "-P" in why_unusable(
        FITTING, ("/p/python", "-P", "-m", "x"), (), "2.13.0", {"HOME": "/h"}
    )
    assert choose(replace(FIT, warm=(FITTING,)), "exec", env={"HOME": "/h"}).warm == ""


def test_the_first_that_fits_is_used() -> None:
    other = replace(FITTING, pid=8, socket="/run/y.sock", python="/q/python")
    made = choose(replace(FIT, warm=(other, FITTING)), env={"HOME": "/h"})
    assert made.warm == "/run/x.sock" and made.unused == ""


# The command
# ------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A user's environment with a place for warm processes."""

    env: dict[str, str]
    folder: Path

    def run(
        self, *words: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> tuple[int, str, str]:
        """Run ``pdrun WORDS`` to its end."""
        done = self.start(*words, env=env, prefix=prefix)
        try:
            out, err = done.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            done.kill()
            raise AssertionError(done.communicate()) from None
        return done.returncode, out, err

    def start(
        self, *words: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """Start ``pdrun WORDS``."""
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "pdrun", *words],
            cwd=self.folder,
            env={**self.env, **(env or {})},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def job(self, *words: str, **more: object) -> tuple[int, str, str]:
        """Run a job on the CPU that writes no files."""
        return self.run("--backend", "cpu", "--no-files", "--prefix", "none", *words, **more)

    def status(self) -> list[dict]:
        """What ``pdrun warm status --json`` says."""
        code, out, _ = self.run("warm", "status", "--json")
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    def write(self, text: str, name: str = "prog.py") -> str:
        (self.folder / name).write_text(text)
        return name


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node without any warm process of other tests."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "run").mkdir(mode=0o700)
    env = {**plain_environment(), "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder / "run")}
    made = Node(env, folder)
    yield made
    made.run("warm", "stop")


@pytest.fixture
def warm(node: Node) -> int:
    """The pid of the node's warm process, started where there is none."""
    code, _, err = node.run("warm", "start")
    assert code == 0, err
    return int(re.findall(r"is warm.*: pid (\d+)", err)[0])


FORKED = "import gc, os, torch\nforked = gc.get_freeze_count() > 10000\n"


def test_the_next_job_uses_it_and_says_so(node: Node, warm: int) -> None:
    script = node.write(FORKED + "print(forked, os.environ['RANK'])\n")
    before = node.status()[0]["served"]
    code, out, err = node.job("--explain", "--devices", "2", script)
    assert code == 0 and sorted(out.splitlines()) == ["True 0", "True 1"], err
    assert f"start fork: from the warm process {warm} with torch" in err
    code, out, _ = node.job("--dry-run", script)
    assert f"start      fork: from the warm process {warm}" in out
    wait_until(lambda: node.status()[0]["running"] == 0, 20)
    assert node.status()[0]["served"] == before + 1


def test_start_is_idempotent_and_status_tells(node: Node, warm: int) -> None:
    code, _, err = node.run("warm", "start", "--idle", "1h")
    assert code == 0 and f"is warm already: pid {warm}" in err
    (found,) = node.status()
    assert (
        found["pid"] == warm
        and found["memory_bytes"] > 50e6
        and found["idle_seconds"] == 1800
        and not found["unfit"]
    )
    code, out, _ = node.run("warm", "status")
    assert (
        code == 0
        and re.search(rf"pid {warm}: torch \S+ of \S+, \d+ MB, exits in", out)
        and "used by the next job" in out
    )
    assert node.run("warm", "stop", "1")[0] == 2
    os.kill(warm, signal.SIGSTOP)
    try:
        code, out, err = node.run("warm", "status")
        assert code == 0 and not out and f"the warm process {warm} is stopped" in err
        code, _, err = node.run("warm", "stop", str(warm))
        assert code == 78 and f"continue it with kill -CONT {warm}" in err
    finally:
        os.kill(warm, signal.SIGCONT)


def test_status_says_that_there_is_none(node: Node, tmp_path: Path) -> None:
    code, out, err = node.run("warm", "status", env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert code == 0 and not out and "no warm process of this user runs on this node" in err
    code, out, err = node.run("warm", "status", "--json", env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert code == 0 and not out and not err


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        (["--no-warm"], {}, ""),
        ([], {"PDRUN_NO_WARM": "1"}, ""),
        (["--start", "exec"], {}, ""),
        ([], {"TORCH_SHOW_CPP_STACKTRACES": "1"}, "TORCH_SHOW_CPP_STACKTRACES has another value"),
        (["--env", "TORCH_LOGS=+all"], {}, "TORCH_LOGS has another value"),
        ([], {"PYTHONPATH": "/usr"}, "PYTHONPATH has another value"),
        ([], {"TZ": "UTC"}, "TZ has another value"),
    ],
)
def test_what_does_not_fit_is_ignored_with_one_line(
    node: Node, warm: int, words: list[str], env: dict[str, str], why: str
) -> None:
    script = node.write(FORKED)
    code, out, _ = node.job("--dry-run", "--explain", *words, script, env=env)
    assert code == 0 and "from the warm process" not in out
    lines = [line for line in out.partition("why:")[2].splitlines() if "the warm process" in line]
    assert lines == (
        [f"  the warm process {warm} is not used: {why}, which affects the import"] if why else []
    )


def test_another_interpreter_gets_one_of_its_own(node: Node, warm: int) -> None:
    other = node.folder / "env"
    torch = pytest.importorskip("torch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    for path in (Path(sys.prefix) / "lib").glob("python3*/site-packages"):
        target = other / "lib" / path.parent.name / "site-packages"
        (target / "outer.pth").write_text(f"import site; site.addsitedir({str(path)!r})\n")
        (target / "torch").symlink_to(Path(torch.__file__).parent)
    python, script = (
        str(other / "bin" / "python"),
        node.write(FORKED + "import sys\nprint(forked, sys.prefix)\n"),
    )
    _, out, _ = node.job("--dry-run", "--python", python, script)
    assert "is not used: its interpreter is" in out
    code, _, err = node.run("warm", "start", "--python", python)
    assert code == 0, err
    assert len(node.status()) == 2
    code, out, err = node.job("--explain", "--python", python, script)
    assert code == 0 and out == f"True {other}\n", err
    mine = next(found["pid"] for found in node.status() if found["python"] == python)
    assert mine != warm and f"from the warm process {mine}" in err
    assert node.run("warm", "stop", str(mine))[0] == 0
    assert [found["pid"] for found in node.status()] == [warm]


@pytest.mark.parametrize("how", [thorough("stop"), "kill"])
def test_a_job_goes_on_and_the_next_one_is_cold(node: Node, warm: int, how: str) -> None:
    script = node.write(
        FORKED + "print(forked, flush=True)\n"
        "while not os.path.exists('go'): __import__('time').sleep(0.01)\n"
        "raise SystemExit(5)\n"
    )
    (node.folder / "go").unlink(missing_ok=True)
    job = node.start("--backend", "cpu", "--no-files", script)
    assert job.stdout is not None and job.stdout.readline() == "True\n"
    if how == "stop":
        assert "1 running job(s) continue" in node.run("warm", "stop")[2]
    else:
        os.kill(warm, signal.SIGKILL)
    wait_until(lambda: not is_alive(warm), 10)
    (node.folder / "go").write_text("")
    assert job.wait(60) == 5
    job.communicate()
    code, out, err = node.job("--explain", node.write(FORKED + "print(forked)\n"))
    assert (
        (code, out) == (0, "True\n")
        and "from the warm process" not in err
        and "one process imports" in err
    )


def test_a_restart_is_forked_from_it_as_well(node: Node, warm: int) -> None:
    script = node.write(
        FORKED
        + """
generation = os.environ['TORCHELASTIC_RESTART_COUNT']
print(generation, forked, flush=True)
if generation == '0' and os.environ['RANK'] == '1':
    os.kill(os.getpid(), 9)
import torch.distributed as dist
dist.init_process_group('gloo')
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    )
    code, out, err = node.job("--devices", "2", "--max-restarts", "1", "--grace", "1", script)
    assert (
        code == 0 and sorted(out.splitlines())[-2:] == ["1 True", "1 True"] and "0 True" in out
    ), err


@pytest.mark.slow
def test_eight_jobs_at_once(node: Node, warm: int) -> None:
    script = node.write(
        FORKED
        + """
import torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1)
dist.all_reduce(x)
print(forked, int(x), os.environ['MINE'], flush=True)
dist.destroy_process_group()
"""
    )
    jobs = [
        node.start(
            "--backend",
            "cpu",
            "--devices",
            "2",
            "--no-files",
            "--prefix",
            "none",
            script,
            env={"MINE": str(number)},
        )
        for number in range(8)
    ]
    for number, job in enumerate(jobs):
        out, err = job.communicate(timeout=150)
        assert (job.returncode, out) == (0, f"True 2 {number}\n" * 2), err


def test_nothing_outlives_a_killed_launcher(node: Node, warm: int) -> None:
    script = node.write("import torch\n" + SLEEPER)
    (node.folder / "pids").unlink(missing_ok=True)
    job = node.start("--backend", "cpu", "--devices", "2", "--no-files", script)
    started = pids(node.folder, 6)
    job.kill()
    job.communicate()
    wait_until(lambda: not any(map(is_alive, started)), 5.0, "everything gone")
    assert is_alive(warm)


def test_a_token_and_the_jobs_variables_never_reach_it(node: Node, warm: int) -> None:
    script = node.write(FORKED + "print(forked)\n")
    secret = os.urandom(12).hex()
    code, out, err = node.job(
        "--env", f"MY_SECRET={secret}", script, env={"PDRUN_TOKEN": "ab" * 32, "ANOTHER": secret}
    )
    assert (code, out) == (0, "True\n"), err
    text = Path(f"/proc/{warm}/environ").read_bytes()
    assert secret.encode() not in text and b"abababab" not in text and b"PDRUN_TOKEN" not in text


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a namespace")
def test_another_namespace_is_told(node: Node, warm: int) -> None:
    _, out, _ = node.job("--dry-run", node.write(FORKED), prefix=("unshare", "--uts"))
    assert (
        f"the warm process {warm} is not used: its namespace uts differs from that of this process"
        in out
    )


def test_environments_that_cannot_be_forked_are_refused(node: Node) -> None:
    code, _, err = node.run("warm", "start", env={"OMP_PROC_BIND": "true"})
    assert code == ConfigError("").exit_code and "OMP_PROC_BIND" in err
    code, _, err = node.run("warm", "start", "--python", "/no/such/python")
    assert code == 2 and "--python" in err


def test_another_pdrun_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, heard = tmp_path / "pdrun", list[str]()
    monkeypatch.setattr(warm_start, "LOCK_SECONDS", 0.2)
    with warm_start.locked_dir(folder, heard.append):
        with pytest.raises(
            DeadlineExceeded, match=r"pdrun/lock: another pdrun has locked it for 0\.2 s"
        ):
            with warm_start.locked_dir(folder, heard.append):
                pass
    assert len(heard) == 1
    with warm_start.locked_dir(folder, heard.append):
        assert len(heard) == 1
