"""
Head and loss in one function: logits never exist for all rows at one time.

Start reading here: linear_cross_entropy.py; causal_models.py gives it to models of transformers.
"""
