"""
click commands: parse words, call one room below, return an exit code. No decision of its own.

May import: everything of launcher/, ui.
Start reading here: main.py.
"""
