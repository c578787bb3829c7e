"""Callbacks that set hyperparameters."""
