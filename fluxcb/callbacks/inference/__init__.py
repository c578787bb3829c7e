"""Callbacks that run the model on other data during training."""
