"""
Automatic parallelisation: prices of plans, the search for the cheapest plan, plan files.

May import: operators, pipeline, zero, training, model, comm, startup, layouts.
Start reading here: choose.py.
"""
