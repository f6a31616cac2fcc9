"""
Environment variables that are read when a process starts or imports torch.

A worker that is forked after the import ignores a later change of them. The launcher decides with
this module between fork and exec. The fork server loads it by path, because its interpreter may
have no pdrun. Standard library only.

The names come from tracing ``import torch`` (2.11 to 2.13), its libraries and torch._dynamo. If a
name is missing here, a forked worker ignores a late change of it. A superfluous name costs only
speed. Variables that torch, NCCL, gloo or a driver read at first use (NCCL_*, GLOO_*,
CUDA_VISIBLE_DEVICES) are not listed.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

IMPORT_VARIABLES = re.compile(
    r"PYTHON\w*|LD_\w+|MALLOC_\w+|GLIBC_TUNABLES|LANG|LC_\w+|TZ"  # read when a process starts
    r"|OMP_\w+|GOMP_\w+|KMP_\w+|MKL_\w+|OPENBLAS_\w+|GOTO_\w+|MKLDNN_\w+|DNNL_\w+|ONEDNN_\w+"
    r"|BLIS_\w+"
    r"|PYTORCH_(?:CUDA_|HIP_|NPU_|)ALLOC_CONF|PYTORCH_JIT\w*|PYTORCH_NVML_BASED_CUDA_CHECK"
    r"|TORCH_(?:SHOW_CPP_STACKTRACES|CPP_LOG_LEVEL|LOGS|LOGS_FORMAT|LOGS_OUT|TRACE|USE_RTLD_GLOBAL"
    r"|DEVICE_BACKEND_AUTOLOAD|ALLOW_TF32_CUBLAS_OVERRIDE|BLAS_PREFER_\w+|COMPILE\w*"
    r"|DISTRIBUTED_DEBUG)"
    r"|TORCHDYNAMO_\w+|TORCHINDUCTOR_\w+|TRITON_\w+|KINETO_\w+|NPY_\w+|NUMPY_\w+|TQDM_\w+"
)
"""Variables that are read before or during the import."""
SESSION_VARIABLES = re.compile(
    r"_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|PS[1-4]|PROMPT\w*|HIST\w*|LS_COLORS|LESS\w*|MAIL|COLORTERM"
    r"|TERM\w*|WINDOWID|VTE_\w+|SSH_\w+|TMUX\w*|STY|GPG_\w+|DISPLAY|WAYLAND_DISPLAY|DBUS_\w+"
    r"|XDG_(?:SESSION|SEAT|VTNR)\w*|INVOCATION_ID|JOURNAL_STREAM"
)
"""
Variables of a shell or a terminal. They matter if a module looked them up by name, not if it only
iterated over the environment.
"""
PER_WORKER_VARIABLES = re.compile(r"(?:\w+_)?VISIBLE_DEVICES|ZE_AFFINITY_MASK")
"""Variables that may differ between the workers of a node, because they are read at first use."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
)
"""Variables that a forked worker applies itself; integers only."""
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
Variables that require exec if they are set: tools that attach when a process starts, fixed CPUs.
"""


def is_import_variable(name: str) -> bool:
    """Return whether a change of this variable after the import has no effect."""
    return IMPORT_VARIABLES.fullmatch(name) is not None


def is_session_variable(name: str) -> bool:
    """Return whether a variable only describes the shell or terminal of a command."""
    return SESSION_VARIABLES.fullmatch(name) is not None


def why_exec_needed(environ: dict[str, str]) -> str:
    """Return why workers with this environment must be executed, or the empty string."""
    for name in EXEC_VARIABLES:
        if environ.get(name):
            return f"{name} is set, which is read when a process starts"
    for name in THREAD_VARIABLES:
        if not re.fullmatch(r"[1-9][0-9]{0,3}|", environ.get(name, "")):
            return f"{name} must be a number of threads from 1 to 9999, got {environ[name]!r}"
    return ""


def import_environment(environ: dict[str, str]) -> dict[str, str]:
    """
    Return the environment for the import: one thread, so that no thread pool exists at a fork.
    """
    return {**environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


_SETS_ENVIRON = re.compile(r"environ|putenv")


def find_late_assignment(
    text: str, is_late_variable: Callable[[str], bool]
) -> tuple[int, str] | None:
    """
    Return line and name of the first variable that a program sets before it imports torch, although
    a forked worker has torch imported already.

    Args:
        text: the program.
        is_late_variable: see `late_variables`.

    Returns:
        None if there is no such variable, or the text is not Python.
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
        if is_late_variable(name) and line < torch
    ]
    return min(found, default=None)


def _imports_torch(node: object) -> bool:
    import ast

    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"


def _assigned_variables(node: object) -> list[tuple[int, str]]:
    """Return (line, name) of the variables that a statement or call sets by a literal name."""
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
    """Return whether an expression is ``os.environ``, or ``environ`` imported from os."""
    return "environ" in (getattr(node, "attr", ""), getattr(node, "id", ""))
