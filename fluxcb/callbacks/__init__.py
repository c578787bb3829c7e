"""Stub."""
def with_defaults(x): return list(x)
