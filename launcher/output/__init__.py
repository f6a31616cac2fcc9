"""
Workers' output: from pipes to the terminal and log files. It never waits for a reader.

May import: config.spec, diagnosis.traceback_parser, common.
Start reading here: router.py.
"""
