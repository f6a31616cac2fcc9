"""
The runtime half, loaded in workers: it meets the launcher only through
`pdrun.worker_env.WorkerEnv`.
"""
