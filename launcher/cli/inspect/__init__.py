"""
Commands that look at machines and jobs: doctor, plot, export, top, completion.

May import: everything of launcher/, ui.
"""
