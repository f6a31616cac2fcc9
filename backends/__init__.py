"""
Device kinds as tables: visibility variable, collective library, how devices are found and counted.

May import: pdrun floor 0; torch only inside the functions of collectives.py.
Start reading here: base.py.
"""
