"""
Lists of hosts in every grammar.

May import: common.
Start reading here: hostfile.py.
"""
