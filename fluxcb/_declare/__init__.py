"""Stage 1, declare: the classes with which users declare callbacks.

The input is the classes and functions that a user writes. The output is events, phases, a handler table for each class,
state access in normal form, and schedules as data. The next stage can rely on the fact that every invalid declaration
(a wrong signature, an unknown event, a misspelled method, two handlers that fit one moment equally well) has already
raised an error. Nothing in this package imports JAX.
"""
