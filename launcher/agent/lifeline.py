"""
What an agent and the process that started it tell each other on the lifeline, one byte each.
"""

from __future__ import annotations

UP = b"u"
RUNNING = b"r"
"""
How far an agent is, as it tells whoever started it: signals reach it; the scheduler will notice its
end.
"""
FOR_ALL = b"a"
"""
Told to an agent by whoever started it: the signals that follow mean the whole job, not this node
alone.
"""
