"""
Small helpers of this half: scalar parsers, files, addresses, /proc, signals, exit codes.

May import: stdlib_only; pdrun floor 0.
Start reading here: parsers.py.
"""
