"""Job files and other texts to start from. Data only; not imported.

May import: nothing.
Start reading here: job.yaml.
"""
