"""Stage 4, run: what happens each step.

In: plans and compiled programs. Out: a trained state. `engine.py` is the loop; `learner.py` is
what users hold; everything that stands still was settled before.
"""
