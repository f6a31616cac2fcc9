"""
Other launchers: what their environment variables mean, and the commands that start them.

May import: hosts, common.
Start reading here: detect.py, then model.py.
"""
