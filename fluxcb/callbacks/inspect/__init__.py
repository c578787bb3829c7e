"""Callbacks that inspect a running fit."""
