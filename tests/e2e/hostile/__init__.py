"""Hundreds of hostile inputs, made from a seed, and the process that plays them."""
