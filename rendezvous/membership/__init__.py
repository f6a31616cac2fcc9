"""
The pure state machine: step(event, now) -> actions.

May import: policies, protocol.
Start reading here: machine.py.
"""
