"""Populations: several Learners that train in one compiled program, and callbacks that compare them."""
