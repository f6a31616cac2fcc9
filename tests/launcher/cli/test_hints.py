"""What pdrun answers to the habits of other launchers' users: a line that works, or a name."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.launcher.common.name_distance import similar_names
from pdrun.launcher.config.msrun_options import MSRUN_OPTIONS
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS
from pdrun.launcher.launch import execute
from pdrun.launcher.plan.model import LaunchPlan
from tests.launcher.cli.conftest import Outcome

Call = Callable[..., Outcome]


@pytest.fixture
def plans(pdrun: Call, monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans that would have been executed."""
    caught: list[LaunchPlan] = []
    monkeypatch.setattr(execute, "execute", lambda plan: caught.append(plan) or 0)
    return caught


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--nproc 4 train.py", "--nproc; did you mean '--devices'"),
        ("--gpus 4 train.py", "--gpus; did you mean '--devices'?"),
        ("--num-gpu 4 --job x train.py", "--num-gpu; did you mean '--devices'?"),
        ("--device 4 train.py", "--device; did you mean '--devices'?"),
        ("--machines 2 train.py", "--machines; did you mean '--nodes'?"),
        ("--max-restart-count 2 train.py", "did you mean '--max-restarts'?"),
        ("--restarts 2 train.py", "did you mean '--max-restarts'?"),
        ("--log-folder d train.py", "did you mean '--log-dir'?"),
        ("--hostsfile d train.py", "did you mean '--hostfile'?"),
        ("--schedular h:1 train.py", "did you mean '--scheduler'?"),
        ("--verbose train.py", "--verbose; see pdrun --help"),
        ("--lr 3 train.py", "--lr; see pdrun --help; options of the script go after it"),
    ],
)
def test_unknown_options_are_compared_word_by_word(pdrun: Call, line: str, hint: str) -> None:
    outcome = pdrun(*shlex.split(line))
    assert outcome.code == 2
    assert hint in outcome.err and outcome.err.count("\n") == 1


def test_the_distance_of_names() -> None:
    known = ["--devices", "--no-python", "--nproc-per-node", "--start-timeout", "--hang-timeout"]
    assert similar_names("--nproc", known)[0] in ("--devices", "--nproc-per-node")
    assert set(similar_names("--timeout", known)) == {"--start-timeout", "--hang-timeout"}
    assert similar_names("--lr", known) == []


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--num_gpus 4 train.py a", "pdrun --nodes 1 --devices 4 --local-rank-arg local_rank"),
        ("--multi_gpu --num_processes 4 train.py", "pdrun --nodes 1 --devices 4 train.py"),
        ("-np 4 -H a:2,b:2 ./a.out", "pdrun --hosts a:2,b:2 --no-python ./a.out"),
        ("--include localhost:0,1 train.py", "CUDA_VISIBLE_DEVICES=0,1 pdrun --nodes 1"),
        (
            "--worker_num 4 --local_worker_num 4 --join=False train.py",
            "nohup pdrun --nodes 1 --devices 4 train.py &",
        ),
        ("torchrun --nproc_per_node 2 train.py", "use pdrun --nodes 1 --devices 2 train.py"),
        ("accelerate launch --num_processes 2 train.py", "use pdrun --nodes 1 --devices 2 train"),
        ("-n 4 train.py", "pdrun --nodes 1 --devices 4 train.py"),
        ("--cpu --num_processes 4 train.py", "pdrun --devices 4 --backend cpu"),
        ("--tpu train.py", "keep accelerate launch for it"),
    ],
)
def test_options_of_other_launchers_are_refused_with_the_line_that_does_it(
    pdrun: Call, line: str, ours: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    outcome = pdrun(*shlex.split(line))
    assert outcome.code == 2
    assert ours in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("submit", "use pdrun slurm submit"),
        ("list", "use pdrun status"),
        ("cancel", "use pdrun stop"),
        ("version", "use pdrun --version"),
        ("stauts", "did you mean 'status'?"),
    ],
)
def test_unknown_commands_get_a_hint(pdrun: Call, folder: Path, word: str, hint: str) -> None:
    outcome = pdrun(word)
    assert outcome.code == 2
    assert outcome.err == f"pdrun: error: no such command or file '{word}'; {hint}\n"


def test_a_script_with_the_name_of_a_foreign_command_runs(
    pdrun: Call, plans: list[LaunchPlan], folder: Path
) -> None:
    (folder / "submit").write_text("print()\n")
    assert pdrun("submit", "x").code == 0
    assert plans[0].workers[0].argv[1:] == ("submit", "x")


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("train.py --devices 4 --lr 3", ["--devices"]),
        ("train.py --nnodes=2 --nproc_per_node=4", ["--nnodes", "--nproc_per_node"]),
        ("train.py -- --devices 4", []),
        ("train.py --backend gloo --epochs 3", []),
        ("parses.py --max-restarts 4", []),
        ("-m json.tool --devices 4", []),
    ],
)
def test_options_of_pdrun_behind_the_script_are_noticed(
    pdrun: Call, plans: list[LaunchPlan], folder: Path, words: str, warned: list[str]
) -> None:
    (folder / "parses.py").write_text("parser.add_argument('--max_restarts')\n")
    outcome = pdrun(*words.split())
    assert outcome.code == 0
    lines = outcome.err.splitlines()
    assert [line.split(" ")[2] for line in lines] == warned
    assert all(line.endswith("for pdrun write it before") for line in lines)
    assert len(plans) == 1  # the job starts: the arguments may be the script's


def test_translate_prints_the_line_and_what_differs(pdrun: Call) -> None:
    outcome = pdrun("translate", "--", *shlex.split("mpirun -np 2 python train.py --a 'b c'"))
    assert outcome.code == 0
    assert outcome.out.startswith("pdrun --nodes 1 --devices 2 ")
    assert outcome.out.endswith(" train.py --a 'b c'\n")
    assert outcome.err.startswith("pdrun: note: workers get RANK")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("torchrun --run-path train.py", "--run-path: is not supported"),
        ("sbatch job.sh", "'sbatch' is not a launcher that pdrun translates"),
        ("torchrn train.py", "did you mean 'torchrun'?"),
        ("", "missing argument"),
    ],
)
def test_what_cannot_be_translated_is_refused(pdrun: Call, line: str, text: str) -> None:
    outcome = pdrun("translate", "--", *shlex.split(line))
    assert outcome.code == 2
    assert text in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "argv", "kind"),
    [
        ("python train.py --a", ("train.py", "--a"), "script"),
        ("python3 -u train.py", ("train.py",), "script"),
        ("python -m json.tool x", ("-m", "json.tool", "x"), "module"),
    ],
)
def test_a_command_of_python_is_its_script(
    pdrun: Call,
    plans: list[LaunchPlan],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    argv: tuple[str, ...],
    kind: str,
) -> None:
    import sys

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert pdrun("--devices", "1", *line.split()).code == 0
    assert plans[0].workers[0].argv == (sys.executable, *argv)
    assert plans[0].spec.program.kind == kind


@pytest.mark.parametrize("how", [["--launch-compat"], ["--local-rank-arg", "--local-rank"]])
def test_each_worker_gets_its_local_rank(
    pdrun: Call, plans: list[LaunchPlan], how: list[str]
) -> None:
    assert pdrun("--devices", "2", *how, "train.py", "a").code == 0
    argvs = [worker.argv[1:] for worker in plans[0].workers]
    assert argvs == [("train.py", f"--local-rank={rank}", "a") for rank in (0, 1)]


def test_use_env_leaves_the_local_rank_out(pdrun: Call, plans: list[LaunchPlan]) -> None:
    assert pdrun("--launch-compat", "--use_env", "train.py").code == 0
    assert plans[0].workers[0].argv[1:] == ("train.py",)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py", "--launch-compat"),
        ("-m torch.distributed.run --nproc_per_node=2 train.py", "use pdrun --nodes 1 --devices 2"),
        ("--devices 2 torchrun train.py", "pdrun translate -- torchrun"),
        ("mpirun -np 2 ./a.out", "pdrun --nodes 1 --devices 2 --no-python ./a.out"),
    ],
)
def test_a_launcher_is_no_program_of_a_worker(pdrun: Call, line: str, hint: str) -> None:
    outcome = pdrun(*shlex.split(line))
    assert outcome.code == 2
    assert hint in outcome.err and outcome.err.count("\n") == 1


def test_a_hint_names_the_options_that_are_left_out(pdrun: Call) -> None:
    for words in ("mpiexec -n 2 --display-map ./a.out", "-np 2 --display-map x.py"):
        outcome = pdrun(*words.split())
        assert outcome.code == 2
        assert "(--display-map is left out: pdrun --explain prints the places)" in outcome.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torchrun --virtual-local-rank train.py", "LOCAL_RANK is always the number"),
        ("python -m torch.distributed.run --numa-binding socket x.py", "must be node"),
        ("-m torch.distributed.run --signals-to-handle SIGUSR1 x.py", "--signals-to-handle"),
        ("-np 2 --output-filename logs --start-timeout x x.py", "--start-timeout"),
        ("-m torch.distributed.run " * 80 + "x.py", "torch.distributed.run is a launcher"),
    ],
)
def test_no_hint_has_a_line_that_pdrun_refuses(pdrun: Call, line: str, reason: str) -> None:
    outcome = pdrun(*shlex.split(line))
    assert outcome.code == 2
    assert reason in outcome.err
    for text in ("use pdrun --nodes 1", "this line does it"):
        assert text not in outcome.err


def test_an_option_of_another_launcher_names_an_option_of_pdrun() -> None:
    own = {name for row in RUN_OPTIONS for name in row.names}
    theirs = [row for row in (*TORCHRUN_OPTIONS, *MSRUN_OPTIONS) if row.same_as]
    assert len(theirs) >= 10
    for row in theirs:
        assert row.same_as in own and row.same_as in row.help
        assert row.origin != "pdrun"
