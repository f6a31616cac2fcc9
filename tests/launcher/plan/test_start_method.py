"""Fork or exec: what decides, as tables; and what a program's text tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.config.spec import JobSpec, Program
from pdrun.launcher.plan.model import Facts
from pdrun.launcher.plan.script_scan import scan_script
from pdrun.launcher.plan.start_method import choose_start_method
from pdrun.launcher.stdlib_only.import_env import (
    find_late_assignment,
    import_environment,
    is_import_variable,
    why_exec_needed,
)
from pdrun.launcher.stdlib_only.late_variables import is_late_variable
from pdrun.topology import CpuSet

FIT = Facts(
    hostname="h",
    environ={},
    cwd="/",
    python="/p/python",
    python_version="3.11",
    torch_version="2.13.0",
    pdrun_version="0",
    cpus=CpuSet((0, 1), None, (), ()),
    backends=(),
    addresses=(),
    uid=0,
    imports_torch=True,
)


def choose(facts: Facts = FIT, start: str = "auto", kind: str = "script", env=None, visible=None):
    spec = JobSpec(Program(kind, "train.py", start=start))  # type: ignore[arg-type]
    return choose_start_method(spec, facts, {"program.start": "--start"}, env or {}, visible or {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"imports_torch": False}, "does not import torch"),
        ({"torch_version": ""}, "not installed"),
        ({"exec_reason": "a folder"}, "a folder"),
        ({"late_variable": "a.py:3 sets OMP_NUM_THREADS"}, "a.py:3 sets"),
    ],
)
def test_auto_uses_exec_if_a_fork_is_unsafe_or_useless(changes: dict, words: str) -> None:
    found = choose(replace(FIT, **changes))
    assert found.how == "exec" and words in found.reason


@pytest.mark.parametrize(
    "env",
    [
        {"LD_PRELOAD": "x.so"},
        {"OMP_PROC_BIND": "true"},
        {"OMP_NUM_THREADS": "4,2"},
        {"OMP_NUM_THREADS": "0"},
    ],
)
def test_variables_read_at_process_start_require_exec(env: dict[str, str]) -> None:
    assert choose(env=env).how == "exec"
    with pytest.raises(UsageError, match="cannot be forked"):
        choose(start="fork", env=env)


def test_start_fork_and_start_exec() -> None:
    assert choose().how == "fork" and not choose().strict
    assert choose(start="exec").how == "exec"
    assert choose(replace(FIT, imports_torch=False), "fork").strict
    with pytest.raises(UsageError, match="a command runs without Python"):
        choose(start="fork", kind="command")


def test_a_program_with_an_optimizer_imports_dynamo() -> None:
    assert "torch._dynamo" not in choose().modules
    assert "torch._dynamo" in choose(replace(FIT, uses_optimizer=True)).modules


def test_only_variables_that_are_read_at_first_use_may_differ_between_workers() -> None:
    assert (
        choose(visible={0: {"CUDA_VISIBLE_DEVICES": "0"}, 1: {"CUDA_VISIBLE_DEVICES": "1"}}).how
        == "fork"
    )
    assert "TORCH_LOGS differs" in choose(visible={0: {"TORCH_LOGS": "x"}}).reason


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", (2, "OMP_NUM_THREADS")),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'", None),
        (
            "from os import environ\n"
            "environ.setdefault('MKL_NUM_THREADS', '1')\nfrom torch import nn",
            (2, "MKL_NUM_THREADS"),
        ),
        ("import os\nos.environ.update({'NPY_X': '1'}, TORCH_LOGS='x')\n", (2, "NPY_X")),
        ("import os\nos.environ.update({'KMP_X': '1'}, TORCH_LOGS='x')\n", (2, "TORCH_LOGS")),
        ("import os\nos.putenv('LD_LIBRARY_PATH', 'x')\nimport torch", None),
        ("import os\nos.environ['PYTHONHASHSEED'] = '1'\nimport torch", None),
        ("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'\nimport torch", None),
        (
            "import os\ndel os.environ['PYTORCH_CUDA_ALLOC_CONF']\nimport torch",
            (2, "PYTORCH_CUDA_ALLOC_CONF"),
        ),
        ("import os\nos.environ |= {'NPY_X': '1'}\nimport torch", (2, "NPY_X")),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch", None),
        ("import os\nos.environ['NCCL_DEBUG'] = 'INFO'\nimport torch", None),
        (
            "import os\nos.putenv(b'\\xff\\xfe', b'x')\n"
            "os.putenv(b'OMP_NUM_THREADS', b'1')\nimport torch",
            (3, "OMP_NUM_THREADS"),
        ),
        ("os.environ[name] = 'x'", None),
        ("environ = broken(", None),
    ],
)
def test_assignments_before_the_import_are_found(text: str, found: tuple[int, str] | None) -> None:
    assert find_late_assignment(text, is_late_variable) == found


def test_imported_names() -> None:
    assert all(
        map(
            is_import_variable,
            (
                "OMP_NUM_THREADS",
                "PYTHONPATH",
                "LD_PRELOAD",
                "TORCH_LOGS",
                "PYTORCH_CUDA_ALLOC_CONF",
            ),
        )
    )
    assert not any(
        map(
            is_import_variable,
            ("RANK", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "TORCH_HOME"),
        )
    )
    assert why_exec_needed({"OMP_NUM_THREADS": "4"}) == ""


def test_a_programs_own_modules_are_scanned(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from . import model\n")
    (tmp_path / "pkg" / "model.py").write_text(
        "import os\nos.environ['OMP_X'] = '1'\nfrom torch import optim\n"
    )
    script = tmp_path / "train.py"
    for text, torch in (
        ("import pkg\n", True),
        ("import sys  # torch\n", False),
        ("import numpy, torch\n", True),
        ("import pdrun\npdrun.init()\n", True),
        ("import pdrun\n", False),
    ):
        script.write_text(text)
        assert scan_script(script, text.encode()).imports_torch is torch, text
    found = scan_script(script, b"import pkg\n")
    assert found.uses_optimizer and found.late_variable == "model.py:2 sets OMP_X"


def test_the_import_runs_with_one_thread() -> None:
    found = import_environment({"OMP_NUM_THREADS": "8", "OTHER": "x"})
    assert found == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OTHER": "x",
    }
