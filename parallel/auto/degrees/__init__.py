"""
The outer search: degrees of the mesh, optimizer level, recomputation, micro-batches, schedule.

May import: auto.search, auto.prices, operators, pipeline, training, data, layouts.
Start reading here: planner.py.
"""
