"""
The status of jobs on screens and in lines. Reads only the event log.

May import: pdrun floor 0.
Start reading here: status.py.
"""
