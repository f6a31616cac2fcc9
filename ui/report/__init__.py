"""
The report of a job: one HTML file without scripts, made from its event log.

    history.py    the log, read once: generations, nodes, exits, progress
    svg.py        timeline and curves
    origin.py     versions and settings
    page.py       the file

The same log gives the same bytes. All text comes from other machines: it is escaped, and values
that look like secrets are blanked (`text.py`). Start reading in `page`.
"""
