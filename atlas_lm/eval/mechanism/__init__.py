"""Experiments on the operation itself: what a memory holds, joins, loses and costs.

Gates are given by hand and nothing but the memory is trained, so that each takes seconds to minutes
on a CPU: `python -m atlas_lm.eval.mechanism`. docs/mechanism.md says what came out.
"""
