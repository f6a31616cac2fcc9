"""
Random numbers that do not depend on the number of ranks.

May import: layouts, torch_compat.
Start reading here: step_rng.py.
"""
