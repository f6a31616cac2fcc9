"""
What is done to a model before training: weights, shards of weights, meta init, batch norm.

May import: comm, rng, layouts.
Start reading here: weights.py.
"""
