"""
Linear modules that multiply in fp8: ``precision="fp8"``.

May import: model.
Start reading here: modules.py, then product.py.
"""
