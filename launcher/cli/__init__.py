"""
click commands: parse arguments, call one room below, return an exit code. No decisions here.

May import: everything of launcher/, ui.
Start reading here: main.py.
"""
