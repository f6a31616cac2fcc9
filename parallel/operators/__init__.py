"""Operator-level parallel: a model as a graph of operators, a layout for each, and the local graph that results."""
