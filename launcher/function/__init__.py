"""
`pdrun.launch(fn)`: function in, list of results out.

May import: launch, jobs, config, common.
Start reading here: launch.py.
"""
