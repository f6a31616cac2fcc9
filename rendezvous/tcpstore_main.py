"""
Serves torch's TCPStore on a socket that the agent has bound: ``python tcpstore_main.py``, socket as
fd 3.

It serves until it is killed, and has no other listening socket. With versions of torch that are
known to work (2.11 to 2.14) it loads only torch's C library, not the package, while the workers
need the cores for their own import of torch: 0.22 s and 144 MB instead of 0.94 s and 217 MB (2.13
CPU), 395 MB instead of 507 MB (2.11 CUDA). If that fails, the process starts again with the full
package. It is run by its path with the *workers'* interpreter, which needs torch and not pdrun.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import sys
import types
from pathlib import Path

LISTEN_FD = 3
FULL_TORCH_FLAG = "--whole"
_MIN_LIGHT_VERSION = (2, 11)
_MAX_LIGHT_VERSION = (2, 14)


def light_store_class(root: Path) -> type:
    """
    Return TCPStore from torch's C library alone. Leaves an empty ``torch`` module in this process.

    Args:
        root: folder of the package torch.
    """
    import ctypes

    for name in ("torch", "torch.distributed"):
        hollow = types.ModuleType(name)
        hollow.__path__ = [str(root)] if name == "torch" else []
        sys.modules[name] = hollow
    dependencies = root / "lib" / "libtorch_global_deps.so"
    if dependencies.exists():
        ctypes.CDLL(str(dependencies), mode=ctypes.RTLD_GLOBAL)
    library = importlib.import_module("torch._C")
    library._c10d_init()
    found: type = importlib.import_module("torch._C._distributed_c10d").TCPStore
    return found


def full_store_class() -> type:
    """Return TCPStore of the full package."""
    from torch.distributed import TCPStore

    found: type = TCPStore
    return found


def find_torch_root() -> Path:
    """Return the folder of the package torch; without torch, end the process with one line."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable} has no torch, which MASTER_PORT's store needs")
    return Path(spec.origin).parent


def can_load_light(root: Path) -> bool:
    """Whether this version of torch was tested with its C library alone."""
    try:
        match = re.search(r"__version__ = '(\d+)\.(\d+)", (root / "version.py").read_text("utf-8"))
    except OSError:
        return False
    return (
        match is not None
        and _MIN_LIGHT_VERSION <= (int(match[1]), int(match[2])) <= _MAX_LIGHT_VERSION
    )


def serve_store(store_class: type) -> object:
    """Create a store on the socket. The caller must keep the returned object."""
    listener = socket.socket(fileno=LISTEN_FD)
    host, port = listener.getsockname()[:2]
    number = listener.detach()  # the store owns it now
    return store_class(host, port, None, True, wait_for_workers=False, master_listen_fd=number)


def main(argv: list[str]) -> None:
    """
    Serve until SIGKILL. Other signals of a terminal or a batch system are for the workers, which
    may still save.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    here = Path(__file__).resolve()
    # Modules beside this file must not hide modules of the same name.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here.parent]
    if "torch" in sys.modules:  # forked from a process that has it
        store = serve_store(full_store_class())
        while store:
            signal.pause()
    root = find_torch_root()
    if FULL_TORCH_FLAG in argv or not can_load_light(root):
        store_class = full_store_class()
    else:
        try:
            store_class = light_store_class(root)
        except Exception as error:
            print(
                f"torch's C library does not load alone ({error}); loading all of torch",
                file=sys.stderr,
            )
            os.execv(sys.executable, [sys.executable, str(here), FULL_TORCH_FLAG])
    store = serve_store(store_class)
    while store:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
