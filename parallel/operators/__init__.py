"""
Operator parallel: a model as a graph of operators, a layout per operator, and this rank's local
graph.

May import: pipeline (types), tensor, model, comm, operators/graph, operators/rules.
Start reading here: module.py, then compiler.py.
"""
