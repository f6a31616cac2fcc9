"""
Context parallel: ring and Ulysses attention.

May import: comm, rng, layouts.
Start reading here: context.py.
"""
