"""
What a successor needs.

May import: membership, protocol.
Start reading here: file.py.
"""
