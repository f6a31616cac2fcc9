"""
The scheduler, as a process or as a library, and its relays.

May import: journal, transport, membership, policies, protocol. Start reading here: service.py.
"""
