"""Callbacks that change gradients, updates or parameters."""
