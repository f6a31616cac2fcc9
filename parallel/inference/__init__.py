"""
Inference: a model cut over a mesh, its weights read by slices, and tokens generated with caches.

May import: everything of parallel/ except parallelize and hooks.
Start reading here: infer.py, then decode.py.
"""
