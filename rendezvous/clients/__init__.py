"""
Processes that join without a launcher, and viewers of a job.

May import: scheduler, transport, membership, protocol. Start reading here: member.py.
"""
