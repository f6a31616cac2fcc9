"""
Messages, events, their codec, and the keys.

May import: pdrun's own modules (errors, endpoint, ...). Start reading here: messages.py.
"""
