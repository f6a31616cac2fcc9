"""Screens. They read the event log and nothing else."""
