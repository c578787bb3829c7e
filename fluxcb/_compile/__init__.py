"""Stage 3, compile: what is built once.

In: a valid callback graph, a model, an optimizer, the shapes of a batch. Out: per moment a tuple
of bound handlers with ready-made proxies, and per phase one jitted, donated program of (carry,
batch). The next stage may rely on it that running costs no dispatch, no permission arithmetic
and no sorting, that a program never retraces silently, and that what traced handlers touch is
what they declared.
"""
