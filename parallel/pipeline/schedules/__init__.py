"""
Schedules as data: builders, validator, timeline. Pure.

May import: nothing.
Start reading here: schedule.py.
"""
