"""Callbacks that are built from functions, hooks or other callbacks."""
