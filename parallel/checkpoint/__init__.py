"""
Save, load, transform, export.

May import: training.state (type), zero, model, comm, layouts.
Start reading here: save_load.py.
"""
