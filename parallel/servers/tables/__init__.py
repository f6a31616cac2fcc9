"""
The tables of one server or of one process: rows and dense weights, optimizers, clocks, files.

No sockets. `store.py` is thread-safe, the other files are not. `clocks.py` is pure.

May import: the frames' and tables' descriptions in servers (settings, sharding), checkpoint, rng.
Start reading here: store.py.
"""
