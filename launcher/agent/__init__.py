"""
The loop of one node: scheduler link, supervisor, workers, signals.

May import: plan, diagnosis, supervisor, common (output and link by protocol only).
Start reading here: agent.py, then generation.py.
"""
