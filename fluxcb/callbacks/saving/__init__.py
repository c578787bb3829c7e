"""Callbacks that write checkpoints, arrays and images."""
