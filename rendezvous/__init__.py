"""
The rendezvous: a pure membership state machine, and the ZeroMQ transport for its messages.

Start reading here: protocol/messages.py, then membership/machine.py.
"""
