"""
``pdrun serve``: the command, and its options beside those of run.

Several groups are run by `pdrun.launcher.controller.server_groups`, the worker's part is
`pdrun.launcher.stdlib_only.serving`.
"""
