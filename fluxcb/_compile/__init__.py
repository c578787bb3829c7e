"""Stage 3, compile: everything that is built once before training.

The input is a valid callback graph, a model, an optimizer, and the shapes of a batch. The output is a tuple of bound
handlers with their proxies for each moment, and one jitted program of (carry, batch), with donation, for each phase.
The next stage can rely on three properties: running needs no dispatch, permission checks or sorting, a program never
retraces silently, and traced handlers use only the state that they declared.
"""
