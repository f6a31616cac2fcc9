"""
Device kinds as tables of facts: which variable hides devices, which collective fits, how to find
and count them.
"""
