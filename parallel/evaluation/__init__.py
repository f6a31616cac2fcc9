"""
Evaluation: sums over all rows, outputs of all rows in order.

May import: training.
Start reading here: evaluate.py.
"""
