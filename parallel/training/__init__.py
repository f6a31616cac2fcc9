"""
One training step: the state of a run, drivers, loss, metrics, checks.

May import: zero, model, comm, data, startup, rng.
Start reading here: step.py, then state.py and driver.py.
"""
