"""
Runs inside of other libraries' loops: transformers, Lightning, and loops written for accelerate.

May import: everything. Nothing of pdrun imports this; each module imports its library.
Start reading here: transformers.py.
"""
