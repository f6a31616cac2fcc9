"""
Commands that hand a job to a cluster's scheduler: ``pdrun slurm``, ``pdrun k8s``.

What they call is in `pdrun.launcher.jobs.sbatch` and `pdrun.launcher.k8s`.
"""
