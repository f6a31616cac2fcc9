"""The runtime half, loaded in workers: it meets the launcher only through `pdrun.env.WorkerEnv`."""
