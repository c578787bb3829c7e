"""Reading handlers: what they touch of the Learner, found in their source, without running anything.

In: a function that is given a learner, and the callback it belongs to. Out: a `Reading`: which places it touches, and
where that cannot be told. It is an abstract interpretation: each expression stands for a set of things that it may be
(`values`), each call has its names (`scope`), statements join what several ways leave behind (`statements`).
"""
