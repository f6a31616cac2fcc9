"""
Operator-level parallel: a model as a graph of operators, a layout for each, and the local graph
that results.

May import: pipeline (types), tensor, model, comm, operators/graph, operators/rules.
Start reading here: module.py.
"""
