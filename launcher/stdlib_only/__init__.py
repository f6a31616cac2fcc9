"""
Run by path, perhaps in another interpreter: standard library only, nothing of pdrun. The folder's
name is its rule.

May import: nothing.
Start reading here: supervisor.py.
"""
