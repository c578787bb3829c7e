"""Stage 2, check: what can be proved from the declarations alone.

In: declarations. Out: a `CallbackGraph`: per moment the one order in which handlers run, and for
each edge the reason it is there. The next stage may rely on it that at every known moment an
order exists, that no two writers are unordered, and that everything read is provided. Nothing
here imports JAX.
"""
