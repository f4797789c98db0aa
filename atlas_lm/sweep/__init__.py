"""Many runs from one command: every combination of listed values, with several seeds, as tables.

grid.py      which runs
runs.py      one after another, resumable
tables.py    means and intervals over seeds, beside what each model costs
figures.py   the same as pictures
"""
