"""
Transports: ZeroMQ with CURVE, reconnection, relay frames, and the in-memory transport.

May import: protocol, pdrun's own modules. Start reading here: base.py.
"""
