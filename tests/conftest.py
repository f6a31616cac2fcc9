"""
The suite is about CPUs: accelerators of the machine that it runs on are hidden, so that `auto` is
one worker.

Device tables are tested against fakes (tests/backends); tests that look for a real accelerator find
none, unless PDRUN_TEST_GPUS=2 says that it has so many and that tests/parallel/test_gpu.py is to
use them.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pdrun import process_setup
from tests.lib import tiers
from tests.lib.descriptors import DescriptorWatch

_HIDES = {
    "/dev/nvidia0": "CUDA_VISIBLE_DEVICES",
    "/dev/kfd": "HIP_VISIBLE_DEVICES",
    "/dev/davinci0": "ASCEND_RT_VISIBLE_DEVICES",
}

for _path, _name in _HIDES.items():
    if Path(_path).exists() and not os.environ.get("PDRUN_TEST_GPUS"):
        os.environ[_name] = ""

# What a background job of a shell, or nohup, has made this process ignore, all that is started here
# would ignore too.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

FOREIGN_PREFIXES = (
    *(
        "PDRUN_",
        "MS_",
        "PET_",
        "TORCHELASTIC_",
        "XDG_",
        "SLURM_",
        "SBATCH_",
        "SRUN_",
        "PMI_",
        "PMIX_",
    ),
    *("OMPI_", "I_MPI_", "HYDRA_", "PBS_", "LSB_", "FLUX_", "KUBERNETES_"),
    *("LWS_", "SKYPILOT_", "DSTACK_", "AWS_BATCH_", "MLP_", "BEAKER_", "DET_", "PADDLE_"),
    *("PAI_", "LOADL_"),
)
FOREIGN_NAMES = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "NNODES",
        "NUM_NODES",
        "N_NODES",
        "NODE_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK_TABLE_FILE",
        "RANK_ID",
        "RANK_SIZE",
        "DEVICE_ID",
        "OMP_NUM_THREADS",
    ]
)


def is_foreign(name: str) -> bool:
    """Return whether a variable would tell a command about the user's jobs, files or launcher."""
    if name.startswith(("PDRUN_TEST_", "PDRUN_GOLDEN")) or name in ("PDRUN_VENV", "PDRUN_PYTHON"):
        return False
    return name in FOREIGN_NAMES or name.startswith(FOREIGN_PREFIXES)


def leave_users_state() -> None:
    """
    Give the tests a home of their own: no cookie, job registry or warm process of the user is seen.

    pytest's own folders stay in the user's TMPDIR; the commands under test use the default.
    """
    tempfile.gettempdir()  # remembered before the variable goes
    os.environ.pop("TMPDIR", None)
    for name in [name for name in os.environ if is_foreign(name)]:
        del os.environ[name]
    if "PYTEST_PDRUN_HOME" not in os.environ:  # else: a process of xdist, inside of the first one's
        os.environ["PYTEST_PDRUN_USER_HOME"] = str(Path.home())
        os.environ.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        home = tempfile.mkdtemp(prefix="pdrun-tests-", dir="/tmp")
        os.environ["PYTEST_PDRUN_HOME"] = home
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = os.environ["PYTEST_PDRUN_HOME"]


leave_users_state()

# How long an example takes says nothing on a machine that others use as well.
_COMMON: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("fast", max_examples=30, **_COMMON)
settings.register_profile("thorough", max_examples=400, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--thorough``."""
    parser.addoption(
        "--thorough", action="store_true", help="all cases, more examples, long simulations"
    )
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files and their tests at random")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier before any test module is imported; processes of xdist inherit it."""
    if config.getoption("--thorough"):
        os.environ[tiers.VARIABLE] = "1"
    settings.load_profile("thorough" if tiers.is_thorough() else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the thorough run has; change the order if asked to."""
    if not tiers.is_thorough():
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    seed = config.getoption("--shuffle")
    if seed is not None:
        shuffle_tests(items, random.Random(seed))


def shuffle_tests(items: list[pytest.Item], source: random.Random) -> None:
    """Change the order of files, and of the tests in each: what a file sets up stays set up."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    source.shuffle(groups)
    for group in groups:
        source.shuffle(group)
    items[:] = [item for group in groups for item in group]


_descriptors = DescriptorWatch()


@pytest.fixture(autouse=True, scope="module")
def no_descriptors_left() -> Iterator[None]:
    """Fail after a module of tests that has left hundreds of descriptors open."""
    yield
    if complaint := _descriptors.complaint():
        pytest.fail(complaint, pytrace=False)


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PDRUN_INTERFACES")


@pytest.fixture(autouse=True)
def no_interface_of_another_test() -> Iterator[None]:
    """`pdrun.init()` sets them in this process, and what a later test starts would inherit them."""
    before = {name: os.environ.get(name) for name in INTERFACE_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def no_token_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A process keeps the token that it once found; tests in one process are to be as separate ones.
    """
    monkeypatch.setattr(process_setup, "_taken_token", [])
