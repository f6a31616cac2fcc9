"""What stands around a launcher: variables, programs that start it, the allocation it runs in."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pdrun.errors import PdrunError
from pdrun.launcher.translate.command_line import translate_command_line


def line_of(line: str, environ: dict[str, str] | None = None) -> str:
    return translate_command_line(shlex.split(line), environ or {}).format_line()


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        (
            "A='b c' CUDA_VISIBLE_DEVICES=1 torchrun train.py",
            "A='b c' CUDA_VISIBLE_DEVICES=1 pdrun --nodes 1 --devices 1 train.py",
        ),
        ("env A=1 torchrun train.py", "A=1 pdrun --nodes 1 --devices 1 train.py"),
        ("nohup torchrun train.py &", "nohup pdrun --nodes 1 --devices 1 train.py &"),
        ("nohup env A=1 torchrun x.py", "nohup env A=1 pdrun --nodes 1 --devices 1 x.py &"),
        (
            "srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc_per_node 8"
            " --rdzv_backend c10d --rdzv_endpoint h:29500 train.py",
            "srun -N 2 --ntasks-per-node=1 pdrun --nodes 2 --devices 8 --scheduler h:29500"
            " train.py",
        ),
        (
            "numactl --interleave all python -m torch.distributed.run --nproc_per_node=2 x.py",
            "numactl --interleave all pdrun --nodes 1 --devices 2 x.py",
        ),
        ("uv run torchrun x.py", "uv run pdrun --nodes 1 --devices 1 x.py"),
        ("/opt/bin/torchrun status", "pdrun --nodes 1 --devices 1 status"),
        ("torchrun -- -x.py a", "pdrun --nodes 1 --devices 1 -- -x.py a"),
    ],
)
def test_what_is_around_a_launcher_stays(line: str, ours: str) -> None:
    assert line_of(line) == ours


def test_variables_of_torchrun_stay_variables() -> None:
    environ = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8"}
    ours = "pdrun --rdzv-conf join_timeout=9 train.py"
    assert line_of("torchrun --rdzv-conf join_timeout=9 train.py", environ) == ours


def test_mpirun_uses_the_nodes_of_an_allocation() -> None:
    slurm = {"SLURM_JOB_NUM_NODES": "4"}
    ours = "pdrun --nodes 4 --devices 8 --no-python ./a.out"
    assert line_of("mpirun -np 32 ./a.out", slurm) == ours
    assert line_of("mpirun -npernode 8 ./a.out", slurm) == ours
    assert "--hosts a:2" in line_of("mpirun -np 2 -H a:2 ./a.out", slurm)
    for environ in (slurm, {"PBS_NODEFILE": "/x"}):
        with pytest.raises(PdrunError, match="pdrun --devices N"):
            line_of("mpirun -np 30 ./a.out", environ)


def test_the_default_configuration_of_accelerate_counts(tmp_path: Path) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 6\n")
    found = translate_command_line(["accelerate", "launch", "train.py"], {"HF_HOME": str(tmp_path)})
    assert found.format_line() == "pdrun --nodes 1 --devices 6 train.py"
    assert "default_config.yaml" in found.notes[0]
    missing = translate_command_line(["accelerate", "launch", "train.py"], {"HF_HOME": "/none"})
    assert missing.format_line() == "pdrun --nodes 1 --devices auto train.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a configuration of accelerate"),
        ("a: [", "is not YAML"),
        ("compute_environment: AMAZON_SAGEMAKER", "SageMaker"),
        ("distributed_type: XLA", "distributed_type XLA is not translated"),
        ("num_processes: x\ndistributed_type: MULTI_GPU", "'x' is not a whole number"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(PdrunError, match=message):
        line_of(f"accelerate launch --config_file {path} train.py")
