"""Modules that hold a part of what torch's hold: tensor, sequence and context parallel by names."""
