"""
The search for the cheapest split of every operator.

May import: auto.prices, operators, layouts.
Start reading here: exact.py.
"""
