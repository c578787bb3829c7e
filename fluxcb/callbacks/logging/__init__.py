"""Callbacks that log values, and `Monitors`, which sends the values to backends."""
