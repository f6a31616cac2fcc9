"""
The parent of all workers as pdrun sees it: client, events, command layout, warm processes.

May import: common, stdlib_only.
Start reading here: client.py.
"""
