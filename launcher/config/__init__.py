"""
From options, variables, a job file and the allocation to one frozen JobSpec with the source of
every value. Pure, except that it reads the files that the options name.

May import: adapters, ranktables, hosts, common.
Start reading here: spec.py, then resolve.py.
"""
