"""
The hazards of forking a process that has imported torch: each is looked for where it would
show.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from pdrun.launcher.supervisor.events import Exited, ForkServerStatus, Spawned, Swept
from tests.launcher.stdlib_only.conftest import Bench, starter_of
from tests.lib.supervisor_driver import is_alive, supervisor_driver, wait_until
from tests.lib.tiers import thorough

ONE_BENCH = pytest.mark.parametrize("bench", ["cold", thorough("warm")], indirect=True)
"""
For programs that import torch in other interpreters, or are run several times: a warm process forks
by the same code, and other tests here have both.
"""

FORKED = "import gc, sys\nassert gc.get_freeze_count() > 10000 and 'torch' in sys.modules\n"
CPUS = sorted(os.sched_getaffinity(0))


@ONE_BENCH
def test_random_state_is_fresh_in_every_worker(bench: Bench, script: Path) -> None:
    script.write_text(
        FORKED
        + """
import random, uuid, tempfile, secrets, torch, numpy
import multiprocessing as mp
print(torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand(), numpy.random.default_rng().random(),
      uuid.uuid4(), uuid.uuid1(), tempfile.mktemp(), secrets.token_hex(), bytes(mp.current_process().authkey).hex(), sep='\\n')
"""
    )
    runs = [bench.run(str(script)).out.splitlines() for _ in range(3)]
    assert [len(run) for run in runs] == [10, 10, 10]
    for drawn in zip(*runs, strict=True):
        assert len(set(drawn)) == 3


def test_numbers_drawn_by_an_import_are_drawn_by_nobody_else(script: Path, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "import random, numpy.random\nrandom.random(), numpy.random.rand()\n"
    )
    script.write_text(
        "import plugin, random, numpy.random\nprint(random.random(), numpy.random.rand())\n"
    )
    with supervisor_driver() as driver:
        bench = Bench(driver)
        bench.env["PYTHONPATH"] = str(tmp_path)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("plugin",)))
        assert driver.wait(ForkServerStatus, None, 30).why == ""
        drawn = [bench.run(str(script)).out.split() for _ in range(2)]
        assert len(drawn[0]) == 2 and not set(drawn[0]) & set(drawn[1])


@ONE_BENCH
def test_seeds_that_a_script_sets_count_as_ever(bench: Bench, script: Path) -> None:
    script.write_text("import torch\ntorch.manual_seed(7)\nprint(torch.rand(3))\n")
    assert bench.run(str(script)).out == "tensor([0.5349, 0.1988, 0.6592])\n"


@pytest.mark.parametrize(
    ("bench", "threads"),
    [("cold", "3"), ("warm", "1"), thorough("cold", "1"), thorough("warm", "3")],
    indirect=["bench"],
)
def test_thread_counts_are_the_workers_own(bench: Bench, script: Path, threads: str) -> None:
    script.write_text("""
import os, threading, time, torch, numpy, ctypes
seen = []
threading.Thread(target=lambda: seen.append(torch.get_num_threads())).start()
while not seen: time.sleep(0.001)
lines = open('/proc/self/maps').read().split()
path = next(word for word in lines if 'openblas' in word)
blas = ctypes.CDLL(path).scipy_openblas_get_num_threads64_()
print(torch.get_num_threads(), seen[0], blas, os.environ['OMP_NUM_THREADS'])
""")
    forked, executed = bench.both(str(script), env={"OMP_NUM_THREADS": threads})
    assert forked.out == executed.out != ""


def test_parallel_regions_and_autograd_work(bench: Bench, script: Path) -> None:
    script.write_text(
        FORKED
        + """
import os, torch
a = torch.rand(700, 700, requires_grad=True)
(a @ a).sum().backward()
torch.nn.functional.conv2d(torch.rand(4, 3, 64, 64), torch.rand(8, 3, 3, 3))
print(len(os.listdir('/proc/self/task')) > 1, a.grad.shape[0])
"""
    )
    ended = bench.run(str(script), env={"OMP_NUM_THREADS": "2"})
    assert (ended.code, ended.out) == (0, "True 700\n"), ended.err


def test_affinity_is_set_before_any_thread(bench: Bench, script: Path) -> None:
    script.write_text("""
import os, torch
torch.rand(600, 600) @ torch.rand(600, 600)
print({tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir('/proc/self/task')})
""")
    ended = bench.run(str(script), cpus=(CPUS[-1],), env={"OMP_NUM_THREADS": "3"})
    assert ended.out == f"{{({CPUS[-1]},)}}\n", ended.err


def test_environment_is_exact_for_python_and_for_c(bench: Bench, script: Path) -> None:
    script.write_text("""
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(libc.getenv(b'MINE'), libc.getenv(b'OPENBLAS_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS'), libc.getenv(b'OMP_NUM_THREADS'))
print(subprocess.check_output(['env'], text=True).count('THREADS'))
os.environ['LATER'] = 'x'
print(libc.getenv(b'LATER'))
""")
    forked, executed = bench.both(str(script), env={"MINE": "a"})
    assert forked.out == executed.out == "b'a' None None b'1'\n1\nb'x'\n"


@ONE_BENCH
def test_isa_choice_is_read_in_the_worker(bench: Bench, script: Path) -> None:
    script.write_text("import torch\nprint(torch.backends.cpu.get_cpu_capability())\n")
    assert bench.run(str(script), env={"ATEN_CPU_CAPABILITY": "default"}).out == "DEFAULT\n"


SET_LATE = """
import os
values = dict(
    OMP_DYNAMIC="true", PYTORCH_JIT="0", TORCH_SHOW_CPP_STACKTRACES="1", TORCH_LOGS="recompiles",
    TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1", TQDM_MININTERVAL="9",
    TORCH_BLAS_PREFER_CUBLASLT="1", TORCH_TRACE=os.getcwd() + "/trace",
    NPY_PROMOTION_STATE="legacy", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1",
)
os.environ.update(values)
"""
SHOW_EFFECTS = """
import ctypes, logging, warnings
warnings.simplefilter("ignore")
import torch, numpy, tqdm
import torch.distributed as dist
def stack_in_error():
    try:
        torch.ones(2).reshape(3)
    except RuntimeError as error:
        return len(str(error)) > 200
gomp = next(line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line)
print(
    ctypes.CDLL(gomp).omp_get_dynamic(),
    torch.jit._state._enabled.enabled,
    stack_in_error(),
    logging.getLogger("torch._dynamo.guards").level
    or bool(torch._logging._internal.log_state.artifact_names),
    dist.get_debug_level().name,
    torch._C._get_cublas_allow_tf32(),
    tqdm.tqdm([], disable=False, file=open("/dev/null", "w")).mininterval,
    torch._C._get_blas_preferred_backend().name,
    [bool(getattr(h, "root_dir", None)) for h in logging.getLogger("torch.__trace").handlers],
    sep="\\n",
)
"""


@ONE_BENCH
def test_late_variables_are_named_if_they_change_something(bench: Bench, script: Path) -> None:
    """An executed worker shows each effect, a forked one none: only that is worth a line."""
    script.write_text(SHOW_EFFECTS)
    without = bench.run(str(script))
    assert without.code == 0, without.err
    script.write_text(SET_LATE + SHOW_EFFECTS)
    forked, executed = bench.both(str(script))
    assert forked.out == without.out
    pairs = zip(executed.out.splitlines(), without.out.splitlines(), strict=True)
    assert [one == other for one, other in pairs] == [False] * 9, executed.out
    (note,) = forked.err.splitlines()
    names = set(note.partition("pdrun: ")[2].partition(": set")[0].split(", "))
    assert names == {
        *("OMP_DYNAMIC", "PYTORCH_JIT", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS"),
        *("TORCH_DISTRIBUTED_DEBUG", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TQDM_MININTERVAL"),
        *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_TRACE", "NPY_PROMOTION_STATE"),
        "OPENBLAS_NUM_THREADS",  # OMP_NUM_THREADS has that value already
    }


SET_WITHOUT_EFFECT = """
import os, sys
for name in ("TZ", "PYTHONHASHSEED", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "MALLOC_ARENA_MAX",
             "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "NCCL_DEBUG", "LANG",
             "TORCHDYNAMO_DISABLE", "KINETO_LOG_LEVEL", "TOKENIZERS_PARALLELISM"):
    os.environ[name] = "1"
if sys.argv[1] == "after":
    import torch, tqdm.auto
    from numpy import random
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
for name in ("OMP_NUM_THREADS", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TQDM_DISABLE", "NPY_X"):
    os.environ[name] = "4"
print(os.environ["TZ"])
"""


@pytest.mark.parametrize("when", ["after", "never"])
def test_variables_that_change_nothing_are_not_named(bench: Bench, script: Path, when: str) -> None:
    """After the import they are late in every worker; without an import nothing reads them."""
    script.write_text(SET_WITHOUT_EFFECT)
    found = bench.run(str(script), when)
    assert (found.code, found.out, found.err) == (0, "1\n", "")


@pytest.mark.parametrize(
    "statement",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch.utils.data import DataLoader",
        "from torch import nn",
        "import importlib; importlib.import_module('torch.optim')",
        "__import__('torch')",
    ],
)
def test_every_kind_of_import_is_noticed(bench: Bench, script: Path, statement: str) -> None:
    script.write_text(f"import os\nos.environ['PYTORCH_JIT'] = '0'\n{statement}\n{statement}\n")
    found = bench.run(str(script))
    assert (found.code, found.err.count("PYTORCH_JIT")) == (0, 1)


def test_no_accelerator_is_touched(bench: Bench, script: Path) -> None:
    script.write_text(
        FORKED
        + """
import os, torch
print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), int(torch._C._cuda_isInBadFork()) if hasattr(torch._C, '_cuda_isInBadFork') else 0)
print([p for p in (os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')) if '/dev/nv' in p])
"""
    )
    assert bench.run(str(script)).out == "False False 0\n[]\n"


PICKLES = """
import multiprocessing as mp, pickle, inspect, sys, torch, threading, time
class Thing:
    value = 7
    def f(self): return self.value
def double(x): return Thing, 2 * x, mp.current_process().name != 'MainProcess'
if __name__ == '__main__':
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    assert inspect.getsource(Thing.f).strip() == 'def f(self): return self.value'
    for method in ('fork', 'spawn', 'forkserver'):
        with mp.get_context(method).Pool(1) as pool:
            kind, two, other = pool.apply(double, (1,))
            print(method, kind.__module__, kind is Thing, two, other)
    threading.Thread(target=lambda: (time.sleep(0.2), print(len(pickle.dumps(Thing())) > 0, flush=True))).start()
"""


@ONE_BENCH
def test_main_classes_pickle_and_multiprocessing_starts_in_three_ways(
    bench: Bench, script: Path
) -> None:
    script.write_text(PICKLES)
    forked = bench.run(str(script))
    lines = [f"{method} __main__ True 2 True" for method in ("fork", "spawn", "forkserver")]
    assert (forked.code, forked.out.splitlines()) == (0, [*lines, "True"]), forked.err


LOADER = (
    FORKED
    + """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i * i)
if __name__ == '__main__':
    for method in ('fork', 'spawn'):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        print([b.tolist() for b in loader])
"""
)


@ONE_BENCH
def test_data_loader_workers(bench: Bench, script: Path) -> None:
    text = LOADER.replace(FORKED, "")
    script.write_text(text)
    ended = bench.run(str(script))
    assert ended.out == "[[0, 1, 4, 9], [16, 25, 36, 49]]\n" * 2, ended.err


def test_the_starters_buffers_are_not_printed_by_workers(script: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "noisy.py").write_text(
        "import sys\nprint('not ended', end='')\nsys.stderr.write('a warning at import\\n')\n"
    )
    script.write_text(
        FORKED.replace(" and 'torch' in sys.modules", "").replace("10000", "100")
        + "print('mine')\n"
    )
    with supervisor_driver() as driver:
        bench = Bench(driver)
        bench.env["PYTHONPATH"] = str(site)
        driver.supervisor.start_fork_server(
            starter_of(bench.env, ("random", "logging", "multiprocessing.process", "noisy"))
        )
        assert driver.wait(ForkServerStatus, None, 30).why == ""
        for _ in range(2):
            ended = bench.run(str(script))
            assert (ended.code, ended.out, ended.err) == (0, "mine\n", "a warning at import\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            (
                "import threading\nthreading.Thread(target=threading.Event().wait,"
                " daemon=True).start()"
            ),
            "left 2 threads",
        ),
        (
            (
                "file = open('/dev/loop-control' if"
                " __import__('os').path.exists('/dev/loop-control') else '/dev/fuse')"
            ),
            "opened /dev/",
        ),
        (
            "import torch.cuda\ntorch.cuda._initialized = True",
            "torch.cuda was initialised by an import",
        ),
        ("raise OSError('no library')", "OSError: no library"),
        ("import os\nos._exit(3)", "ended before it was ready"),
        ("import os\nos.kill(os.getpid(), 9)", "ended before"),
    ],
)
def test_an_unfit_starter_costs_speed_only(
    script: Path, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "plugin.py").write_text(text + "\n")
    script.write_text("import gc\nprint(gc.get_freeze_count() > 100)\n")
    with supervisor_driver() as driver:
        bench = Bench(driver)
        bench.env["PYTHONPATH"] = str(tmp_path)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("plugin",)))
        ended = bench.run(
            str(script), start="auto"
        )  # asked for before the starter has said anything
        state = driver.wait(ForkServerStatus, None, 30)
        assert why in state.why and ended.out == "False\n"
        failed = bench.refused(str(script))
        assert why in failed.message


def test_threads_that_come_later_are_seen_at_the_fork(script: Path, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os\nkept = open('/dev/null')\n"
        "import atexit, gc\nreal = os.listdir\n"
        "def listdir(path='.'):\n"
        "    os.calls = getattr(os, 'calls', 0) + 1\n"
        "    return real(path) + (['2'] if os.calls > 1 and path == '/proc/self/task' else [])\n"
        "os.listdir = listdir\n"
    )
    script.write_text("import gc\nprint(gc.get_freeze_count() > 100)\n")
    with supervisor_driver() as driver:
        bench = Bench(driver)
        bench.env["PYTHONPATH"] = str(tmp_path)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("late",)))
        assert driver.wait(ForkServerStatus, None, 30).why == ""
        assert bench.run(str(script), start="auto", env={"PYTHONPATH": ""}).out == "False\n"


SLEEPER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(['sleep', '300'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    open('pids', 'a').write(f'{os.getpid()}\\n')
    time.sleep(300)
open('pids', 'a').write(f'{os.getpid()}\\n{child.pid}\\n')
time.sleep(300)
"""


def pids(folder: Path, count: int) -> list[int]:
    path = folder / "pids"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, 20, f"{count} pids")
    return [int(word) for word in path.read_text().split()]


def test_nothing_outlives_a_killed_agent_or_keeper(script: Path) -> None:
    """The agent's end of the socket closes, and then the same with the keeper killed."""
    script.write_text(SLEEPER)
    for how in ("agent", "keeper"):
        (script.parent / "pids").unlink(missing_ok=True)
        with supervisor_driver() as driver:
            bench = Bench(driver)
            driver.supervisor.start_fork_server(starter_of(bench.env, ("random",)))
            null = os.open(os.devnull, os.O_RDWR)
            for _ in range(2):
                bench.start((sys.executable, str(script)), null, null, cwd=str(script.parent))
            os.close(null)
            started = pids(script.parent, 6)
            if how == "agent":
                driver.supervisor._socket.close()  # type: ignore[union-attr]
                driver.supervisor._socket = None
            else:
                os.kill(driver.supervisor.pid, signal.SIGKILL)
                with pytest.raises(Exception, match="supervisor process"):
                    wait_until(
                        lambda driver=driver: list(driver.supervisor.read_events()) and False, 5
                    )
            wait_until(
                lambda started=started: not any(map(is_alive, started)), 1.0, "everything gone"
            )


def test_a_dead_starter_hurts_no_worker_and_the_next_is_executed(script: Path) -> None:
    script.write_text(
        "import gc, os, time\nprint(gc.get_freeze_count() > 100,"
        " flush=True)\ntime.sleep(0.5)\nos._exit(9)\n"
    )
    with supervisor_driver() as driver:
        bench = Bench(driver)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("random",)))
        assert driver.wait(ForkServerStatus, None, 30).why == ""
        read, write = os.pipe()
        slot = bench.start((sys.executable, str(script)), write, write)
        assert driver.wait(Spawned, slot).pid > 0
        starter = next(
            int(child)
            for child in (
                Path(f"/proc/{driver.supervisor.pid}/task/{driver.supervisor.pid}/children")
                .read_text()
                .split()
            )
            if b"fork_server" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        os.kill(starter, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(driver.wait(Exited, slot, 20).status) == 9
        assert os.read(read, 99) == b"True\n"
        slot = bench.start((sys.executable, str(script)), write, write, start="auto")
        assert os.waitstatus_to_exitcode(driver.wait(Exited, slot, 20).status) == 9
        assert os.read(read, 99) == b"False\n"
        os.close(read), os.close(write)


def test_leftovers_of_one_worker_are_swept_and_not_its_neighbours(
    bench: Bench, script: Path
) -> None:
    body, _, _ = SLEEPER.rpartition("time.sleep(300)\n")
    script.write_text(body + "if 'stay' in sys.argv: time.sleep(300)\n")
    null = os.open(os.devnull, os.O_RDWR)
    stays = bench.start((sys.executable, str(script), "stay"), null, null, cwd=str(script.parent))
    kept = pids(script.parent, 3)
    slot = bench.start((sys.executable, str(script)), null, null, cwd=str(script.parent))
    os.close(null)
    bench.driver.wait(Exited, slot, 20)
    bench.driver.supervisor.sweep_descendants(slot)
    swept = bench.driver.wait(Swept, slot, 20)
    assert len(swept.processes) == 2, (
        swept
    )  # the sleep, and the fork that shares its parent's memory
    assert all(map(is_alive, kept))
    bench.driver.supervisor.send_signal(stays, signal.SIGKILL, group=True)
    bench.driver.wait(Exited, stays, 20)
    bench.driver.supervisor.sweep_descendants(stays)
    bench.driver.wait(Swept, stays, 20)


def test_workers_are_the_keepers_children_and_their_status_is_exact(
    bench: Bench, script: Path
) -> None:
    script.write_text(
        FORKED + "import os, sys\nprint(os.getppid())\nos.kill(os.getpid(), int(sys.argv[1]))\n"
    )
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1):
        ended = bench.run(str(script), str(int(number)))
        assert ended.code == -number
    script.write_text("import os\nprint(os.getppid(), flush=True)\n")
    assert bench.run(str(script)).out == f"{bench.driver.supervisor.pid}\n"


def test_a_stop_before_the_starter_is_ready_ends_the_worker_unstarted(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(300)\n")
    with supervisor_driver() as driver:
        bench = Bench(driver)
        bench.env["PYTHONPATH"] = str(tmp_path)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("slow",)))
        null = os.open(os.devnull, os.O_RDWR)
        slot = bench.start((sys.executable, str(script)), null, null)
        os.close(null)
        driver.supervisor.send_signal(slot, signal.SIGTERM, group=False)
        ended = driver.wait(Exited, slot, 5)
        assert os.WTERMSIG(ended.status) == signal.SIGTERM


def test_no_descriptor_of_the_starter_or_of_a_neighbour(bench: Bench, script: Path) -> None:
    script.write_text("import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd')))\n")
    forked, executed = bench.both(str(script))
    assert forked.out == executed.out


def test_no_descriptor_of_a_neighbour_that_is_forked_with_it(script: Path) -> None:
    """Orders that wait for the starter come to it together."""
    script.write_text(
        "import os\nos.write(1, f'{len(os.listdir(\"/proc/self/fd\"))}\\n'.encode())\n"
    )
    with supervisor_driver() as driver:
        bench = Bench(driver)
        driver.supervisor.start_fork_server(starter_of(bench.env, ("random",)))
        read, write = os.pipe()
        slots = [bench.start((sys.executable, str(script)), write, write) for _ in range(4)]
        os.close(write)
        for slot in slots:
            assert os.waitstatus_to_exitcode(driver.wait(Exited, slot, 60).status) == 0
        assert os.read(read, 99) == b"4\n" * 4  # the streams, and that of the folder
        os.close(read)
