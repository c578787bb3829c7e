"""The source check: which state handlers use, found by reading their source without running them.

The input is a function that takes a learner, and its callback. The output is a `Reading`: the state that the function
uses, and the places that could not be analyzed. `visitor` follows the source, `frame` holds the state of one function,
`constants` decides conditions on the callback's fields, and `access_rules` compares the result with declared access.
"""
