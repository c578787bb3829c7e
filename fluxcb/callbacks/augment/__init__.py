"""Callbacks that mix examples or smooth labels."""
