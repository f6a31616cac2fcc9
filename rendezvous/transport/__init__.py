"""
Sockets: ZeroMQ, CURVE, reconnection, relay frames, and the in-memory twin.

May import: protocol (and text).
Start reading here: base.py.
"""
