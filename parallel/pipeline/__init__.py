"""
Pipeline parallel: a model cut into stages, and the order in which these work.

May import: training (loss, driver), zero.grad_norm, comm, pipeline/schedules.
Start reading here: pipeline.py, then runner.py.
"""
