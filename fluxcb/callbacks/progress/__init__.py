"""Callbacks that show how a fit is doing."""
