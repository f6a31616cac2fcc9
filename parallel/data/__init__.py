"""
Batches: loader, slicing, position.

May import: rng.
Start reading here: loader.py.
"""
