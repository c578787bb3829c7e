"""Stage 1, declare: what a user states.

In: classes and functions a user writes. Out: events, phases, per-class handler tables, state
access in normal form, schedules as data. The next stage may rely on it that every declaration
that is wrong by itself (a bad signature, an unknown event, a misspelt method, two handlers
that fit one moment equally well) has already been refused. Nothing here imports JAX.
"""
