"""
Processes that join without a launcher, and those that look from outside.

May import: scheduler, transport, membership, protocol.
Start reading here: member.py.
"""
