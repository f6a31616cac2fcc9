"""
Weights, gradients, optimizer state over the data axes (ZeRO levels 0-3).

May import: model, comm.
Start reading here: engine.py.
"""
