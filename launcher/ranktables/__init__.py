"""
Ascend's rank tables: every dialect is read, checked, written and converted. No device is asked.

May import: hosts, common.
Start reading here: read.py.
"""
