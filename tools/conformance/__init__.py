"""Planner vectors: our plans in the recorded form, compared list by list.

Owns the recorded form (its padding, its dummy blocks) and the table of deliberate deviations. The
planners know nothing of either.
"""
