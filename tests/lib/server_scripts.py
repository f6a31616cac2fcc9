"""Text for scripts of tests whose job has parameter servers."""

from __future__ import annotations

FIND_SERVERS = """
def find_servers():
    import os
    own = f"PDRUN_SERVER_KEY={os.environ['PDRUN_SERVER_KEY']}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = open(f"/proc/{pid}/environ", "rb").read()
            command = open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            continue
        if own in environ and b"servers.main" in command:
            found.append(int(pid))
    return found
"""
"""Defines ``find_servers()``: the process ids of the job's servers on this host."""
