"""
Which variables are read when a process starts or imports torch, and so come too late in a worker
forked after that.

Pure text work, standard library only: the launcher decides with it, and the starter, which may run
in an interpreter without pdrun, loads this file by its path. The names come from tracing ``import
torch`` (2.11 to 2.13), its libraries and torch._dynamo. A name that is missing here makes a forked
worker ignore a late change of it; one too many costs speed only. Variables that torch, NCCL, gloo
or a driver read at first use (NCCL_*, GLOO_*, CUDA_VISIBLE_DEVICES) are not among them.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

IMPORT_VARIABLES = re.compile(
    r"PYTHON\w*|LD_\w+|MALLOC_\w+|GLIBC_TUNABLES|LANG|LC_\w+|TZ"  # read when a process starts
    r"|OMP_\w+|GOMP_\w+|KMP_\w+|MKL_\w+|OPENBLAS_\w+|GOTO_\w+|MKLDNN_\w+|DNNL_\w+|ONEDNN_\w+|BLIS_\w+"
    r"|PYTORCH_(?:CUDA_|HIP_|NPU_|)ALLOC_CONF|PYTORCH_JIT\w*|PYTORCH_NVML_BASED_CUDA_CHECK"
    r"|TORCH_(?:SHOW_CPP_STACKTRACES|CPP_LOG_LEVEL|LOGS|LOGS_FORMAT|LOGS_OUT|TRACE|USE_RTLD_GLOBAL"
    r"|DEVICE_BACKEND_AUTOLOAD|ALLOW_TF32_CUBLAS_OVERRIDE|BLAS_PREFER_\w+|COMPILE\w*|DISTRIBUTED_DEBUG)"
    r"|TORCHDYNAMO_\w+|TORCHINDUCTOR_\w+|TRITON_\w+|KINETO_\w+|NPY_\w+|NUMPY_\w+|TQDM_\w+"
)
"""Names whose value counts at import or before it."""
SESSION_VARIABLES = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|PS[1-4]|PROMPT\w*|HIST\w*|LS_COLORS|LESS\w*|MAIL|COLORTERM|TERM\w*|WINDOWID|VTE_\w+"
    r"|SSH_\w+|TMUX\w*|STY|GPG_\w+|DISPLAY|WAYLAND_DISPLAY|DBUS_\w+|XDG_(?:SESSION|SEAT|VTNR)\w*|INVOCATION_ID|JOURNAL_STREAM"
)
"""
Names that a shell or a terminal has for itself: they count where they were asked for by name, not
in a walk.
"""
PER_WORKER_VARIABLES = re.compile(r"(?:\w+_)?VISIBLE_DEVICES|ZE_AFFINITY_MASK")
"""Names that differ between the workers of a node, beside ranks, and are read at first use."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
)
"""Names that a forked worker applies itself: whole numbers only."""
EXEC_VARIABLES = (
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "GOMP_SPINCOUNT",
    "LD_PRELOAD",
    "LD_AUDIT",
    "KMP_BLOCKTIME",
    "NVTX_INJECTION64_PATH",
    "CUDA_INJECTION64_PATH",
    "COVERAGE_PROCESS_START",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONDUMPREFS",
    "PYTHONINSPECT",
)
"""
Names whose very presence means that a process is to be started by exec: tools that attach there,
fixed CPUs.
"""


def is_import_variable(name: str) -> bool:
    """Whether a change of this variable after the import would go unnoticed."""
    return IMPORT_VARIABLES.fullmatch(name) is not None


def is_session_variable(name: str) -> bool:
    """Whether a variable only says from which shell or terminal a command came."""
    return SESSION_VARIABLES.fullmatch(name) is not None


def why_exec_needed(environ: dict[str, str]) -> str:
    """Return why workers with this environment cannot be forked, or the empty string."""
    for name in EXEC_VARIABLES:
        if environ.get(name):
            return f"{name} is set, which counts when a process starts"
    for name in THREAD_VARIABLES:
        if not re.fullmatch(r"[1-9][0-9]{0,3}|", environ.get(name, "")):
            return f"{name}={environ[name]} is no plain number of threads"
    return ""


def import_environment(environ: dict[str, str]) -> dict[str, str]:
    """
    Return the environment for the import itself: one thread, so that no pool is ever made before a
    fork.
    """
    return {**environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


_SETS_ENVIRON = re.compile(r"environ|putenv")


def find_late_assignment(text: str) -> tuple[int, str] | None:
    """
    Return line and name of the first variable that a program sets before its own import of torch,
    and that a forked worker would find set too late; None where there is none, or the text is no
    Python.
    """
    if not _SETS_ENVIRON.search(text):
        return None
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    torch = min(
        (getattr(node, "lineno", 0) for node in ast.walk(tree) if _imports_torch(node)),
        default=1 << 30,
    )
    found = [
        (line, name)
        for node in ast.walk(tree)
        for line, name in _assigned_variables(node)
        if is_import_variable(name) and line < torch
    ]
    return min(found, default=None)


def _imports_torch(node: object) -> bool:
    import ast

    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"


def _assigned_variables(node: object) -> list[tuple[int, str]]:
    """The variables that a statement or call sets by a name written there."""
    import ast

    keys: list[ast.expr] = []
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        keys = [
            target.slice
            for target in targets
            if isinstance(target, ast.Subscript) and _is_environ(target.value)
        ]
        if (
            isinstance(node, ast.AugAssign)
            and _is_environ(node.target)
            and isinstance(node.value, ast.Dict)
        ):
            keys += [key for key in node.value.keys if key is not None]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in ("putenv", "unsetenv") or (
            name in ("setdefault", "pop") and _is_environ(node.func.value)
        ):
            keys = node.args[:1]
        elif name == "update" and _is_environ(node.func.value):
            keys = [
                key
                for arg in node.args
                if isinstance(arg, ast.Dict)
                for key in arg.keys
                if key is not None
            ]
            return [
                *_constant_names(keys, line),
                *((line, word.arg) for word in node.keywords if word.arg),
            ]
    return _constant_names(keys, line)


def _constant_names(keys: Iterable[object], line: int) -> list[tuple[int, str]]:
    found = (getattr(key, "value", None) for key in keys)
    return [
        (
            line,
            name if isinstance(name, str) else name.decode(errors="surrogateescape"),
        )  # as os.environb has it
        for name in found
        if isinstance(name, str | bytes)
    ]


def _is_environ(node: object) -> bool:
    """Whether an expression is ``os.environ``, or ``environ`` imported from it."""
    return "environ" in (getattr(node, "attr", ""), getattr(node, "id", ""))
