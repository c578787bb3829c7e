"""Callbacks that end a fit."""
