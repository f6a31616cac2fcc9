"""
Saves, loads, transforms and exports checkpoints.

May import: training.state (type), zero, model, comm, layouts.
Start reading here: save.py, then load.py.
"""
