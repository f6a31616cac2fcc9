"""
One step: driver, loss, metrics, guards.

May import: zero, model, comm, data, rng.
Start reading here: driver.py.
"""
