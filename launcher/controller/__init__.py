"""
The process that starts several agents (here, over ssh, by mpirun or srun) and shows their output.

May import: agent.lifeline, jobs, plan, output, adapters, common.
Start reading here: controller.py.
"""
