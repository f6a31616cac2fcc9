"""
Batches: the loader, slicing over ranks, the position in the data.

May import: rng.
Start reading here: loader.py.
"""
