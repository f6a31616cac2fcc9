"""
From options, variables, the job file and the allocation to one frozen JobSpec that knows the source
of every value.

Pure, but for reading the files named.

May import: adapters, ranktables, hosts, common.
Start reading here: spec.py, then resolve.py.
"""
