"""
Carries out a plan; the `python -m` entry points of every process that pdrun starts.

May import: controller, agent, jobs, plan, output, supervisor, config, adapters, common.
Start reading here: execute.py.
"""
