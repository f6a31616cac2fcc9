"""
Token files in a Secret volume of Kubernetes.

A Secret volume has links (``token -> ..data/token -> ..2026_11_29.../token``), its files belong to
root, and their modes are 0644, 0444, or 0440 with fsGroup. Outside of a container such a file would
not be private. Inside, the users are those of the pod, and none of them can change the volume.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pdrun.topology import is_in_kubernetes

_MAX_SWAPS = 10
"""Attempts to open a file while the kubelet replaces the volume's content."""
_MOUNT_TABLE = Path("/proc/self/mountinfo")


def open_mounted_secret(path: Path) -> int | None:
    """
    Return a descriptor of a file of a Secret volume; None if the path is not one.

    The conditions, all of them: the process is in Kubernetes. The file is a regular file of the
    same mount as the folder of the path. It belongs to root or to the user, and neither group nor
    others may write it. The mount is read-only, or a tmpfs whose folders the user cannot write.
    """
    if not is_in_kubernetes():
        return None
    for _ in range(_MAX_SWAPS):
        real = os.path.realpath(path)
        try:
            fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        if _is_protected(fd, path.parent, Path(real)):
            return fd
        os.close(fd)
        return None
    return None


def _is_protected(fd: int, folder: Path, real: Path) -> bool:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
        return False
    if status.st_uid not in (0, os.geteuid()):
        return False
    if folder.stat().st_dev != status.st_dev:
        return False
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return True
    is_writable = any(os.access(place, os.W_OK) for place in (folder, real.parent, real))
    return not is_writable and _is_tmpfs(status.st_dev)


def _is_tmpfs(device: int) -> bool:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNT_TABLE.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [wanted] and kind.split()[:1] == ["tmpfs"]:
            return True
    return False
