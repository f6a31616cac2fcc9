"""
Workers' lines: pipes, terminal, log files. Never waits for a reader.

May import: config.spec, diagnosis.traceback_parser, common.
Start reading here: router.py.
"""
