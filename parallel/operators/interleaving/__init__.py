"""
Operators in parts on each rank: layouts with MindSpore's axis "interleaved_parallel".

A rank computes the parts one after the other. Each part has its own collectives, so that those of
one part overlap with the products of another.

May import: operators/plan, operators/redistribute, operators/rules, comm, layouts.
Start reading here: splits.py, then builder.py.
"""
