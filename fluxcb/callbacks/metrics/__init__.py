"""Metrics of training and validation, and the callbacks that compute and record them."""
