"""
What travels: messages, events, codec, keys.

May import: pdrun floor 0.
Start reading here: messages.py.
"""
