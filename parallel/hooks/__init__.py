"""
What a training loop attaches to a run: early stop, best checkpoint, moving average, reports.

May import: run.
Start reading here: watch_value.py.
"""
