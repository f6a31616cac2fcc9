"""
The journal: what a successor of the scheduler needs.

May import: membership, protocol. Start reading here: recovery.py.
"""
