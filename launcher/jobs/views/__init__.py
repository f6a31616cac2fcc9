"""
What people look at: live line, full screen, curves, output and stacks and traces of a running job.

May import: jobs, output, config, common; ui.
"""
