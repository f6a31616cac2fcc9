"""
The lifeline: a socket pair between an agent and the process that started it.

Each message is one byte. If the starting process dies, the agent reads the end of the stream and
ends everything.
"""

from __future__ import annotations

UP = b"u"
"""From the agent: it handles signals now."""
RUNNING = b"r"
"""From the agent: the scheduler notices its end from now on."""
FOR_ALL = b"a"
"""To the agent: the signals that follow mean the whole job, not only this node."""
