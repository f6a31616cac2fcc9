"""
Lists of hosts, in all common grammars.

May import: common.
Start reading here: hostfile.py.
"""
