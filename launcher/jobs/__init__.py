"""
Which jobs this user has; status, logs, stop; Slurm batch jobs.

May import: plan.model, output, config, common; ui.
Start reading here: registry.py, then status.py.
"""
