"""
The operator graph, and how a model is exported to it.

May import: rng, layouts.
Start reading here: graph.py, then export.py.
"""
