"""
Weights, gradients and optimizer state on the data axes (ZeRO levels 0 to 3).

May import: model, comm.
Start reading here: engine.py.
"""
