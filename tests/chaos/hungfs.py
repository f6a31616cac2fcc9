"""
A folder in memory that can hang: a FUSE file system served by this process, with nothing but the
kernel's protocol.

    hungfs.py FOLDER                 mounts itself there and serves; says "mounted"

Stop the process (SIGSTOP) and whoever touches the folder waits, as on a network file system whose
server is away; end it and they get errors. It keeps files and folders of one level or more, sizes
and contents; no links, no permissions. Structures are those of <linux/fuse.h>, protocol 7.19.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from dataclasses import dataclass, field
from enum import IntEnum

LONGEST_WRITE = 128 << 10
OPENED = struct.pack("=Q2I", 0, 1 << 5, 0)
"""struct fuse_open_out: no handle, FOPEN_NOFLUSH."""


class Op(IntEnum):
    """Requests of the kernel."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    OPEN = 14
    READ = 15
    WRITE = 16
    RELEASE = 18
    FSYNC = 20
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    BATCH_FORGET = 42


@dataclass
class Node:
    """A file or a folder."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, Node] = field(default_factory=dict)

    def attributes(self) -> bytes:
        """Return struct fuse_attr."""
        size = len(self.data)
        return struct.pack(
            "=6Q10I",
            self.number,
            size,
            (size + 511) // 512,
            0,
            0,
            0,
            0,
            0,
            0,
            self.mode,
            1,
            0,
            0,
            0,
            4096,
            0,
        )

    def entry(self) -> bytes:
        """Return struct fuse_entry_out; nothing is cached."""
        return struct.pack("=4Q2I", self.number, 0, 0, 0, 0, 0) + self.attributes()


class Refused(Exception):
    """A request that is answered with an error number."""


class FileSystem:
    """All nodes, and what each request does to them."""

    def __init__(self) -> None:
        self.nodes = {1: Node(1, stat.S_IFDIR | 0o755)}

    def answer(self, opcode: int, number: int, body: bytes) -> bytes | None:
        """Return the answer to one request, None where none is expected."""
        node = self.nodes.get(number)
        match opcode:
            case Op.FORGET | Op.BATCH_FORGET:
                return None
            case Op.INIT:
                return struct.pack(
                    "=4I2H2I2H8I", 7, 19, 65536, 0, 12, 10, LONGEST_WRITE, 1, 1, 0, *(0,) * 8
                )[:24]
        if node is None:
            raise Refused(errno.ESTALE)
        match opcode:
            case Op.LOOKUP:
                return self._child(node, body).entry()
            case Op.GETATTR | Op.SETATTR:
                if opcode == Op.SETATTR:
                    self._set(node, body)
                return struct.pack("=Q2I", 0, 0, 0) + node.attributes()
            case Op.MKDIR:
                return self._make(node, body[8:], stat.S_IFDIR | 0o755).entry()
            case Op.CREATE:
                return self._make(node, body[16:], stat.S_IFREG | 0o644).entry() + OPENED
            case Op.OPEN | Op.OPENDIR:
                return OPENED
            case Op.WRITE:
                offset, size = struct.unpack_from("=QI", body, 8)
                node.data[offset : offset + size] = body[40 : 40 + size]
                return struct.pack("=2I", size, 0)
            case Op.READ:
                offset, size = struct.unpack_from("=QI", body, 8)
                return bytes(node.data[offset : offset + size])
            case Op.READDIR:
                return self._list(node, *struct.unpack_from("=QI", body, 8))
            case Op.UNLINK | Op.RMDIR:
                self._child(node, body)
                del node.names[body.rstrip(b"\0")]
                return b""
            case Op.RELEASE | Op.FSYNC | Op.RELEASEDIR:
                return b""
        raise Refused(errno.ENOSYS)

    @staticmethod
    def _child(node: Node, body: bytes) -> Node:
        try:
            return node.names[body.rstrip(b"\0")]
        except KeyError:
            raise Refused(errno.ENOENT) from None

    def _make(self, parent: Node, name: bytes, mode: int) -> Node:
        made = Node(max(self.nodes) + 1, mode)
        self.nodes[made.number] = parent.names[name.rstrip(b"\0")] = made
        return made

    @staticmethod
    def _set(node: Node, body: bytes) -> None:
        valid, _, _, size = struct.unpack_from("=2I2Q", body)
        if valid & 8:  # FATTR_SIZE
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))

    @staticmethod
    def _list(node: Node, offset: int, size: int) -> bytes:
        out = b""
        for index, (name, child) in enumerate(list(node.names.items())[offset:], offset + 1):
            line = struct.pack("=2Q2I", child.number, index, len(name), child.mode >> 12) + name
            line += bytes(-len(line) % 8)
            if len(out) + len(line) > size:
                break
            out += line
        return out


def serve(fd: int) -> None:
    """Answer the kernel's requests until the folder is unmounted."""
    files = FileSystem()
    while True:
        try:
            request = os.read(fd, LONGEST_WRITE + 8192)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                continue
            return
        _, opcode, unique, number = struct.unpack_from("=2I2Q", request)
        try:
            answer, code = files.answer(opcode, number, request[40:]), 0
        except Refused as refused:
            answer, code = b"", -refused.args[0]
        if answer is not None:
            try:
                os.write(fd, struct.pack("=IiQ", 16 + len(answer), code, unique) + answer)
            except FileNotFoundError:  # the asker was interrupted
                pass


def main() -> None:
    """Mount, say so, serve."""
    folder = sys.argv[1]
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,max_read=65536"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hungfs", folder.encode(), b"fuse", 0, options.encode()):
        sys.exit(f"hungfs: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    serve(fd)


if __name__ == "__main__":
    main()
