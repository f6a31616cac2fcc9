"""
The operator graph and how it is exported.

May import: rng, layouts.
Start reading here: graph.py.
"""
