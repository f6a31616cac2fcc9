"""
Ascend's rank tables: every dialect read, checked, written and converted; values only, no device is
asked.

May import: hosts, common.
Start reading here: read.py.
"""
