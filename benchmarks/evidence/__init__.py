"""What small models show of the paper's claims, one command a table: docs/evidence.md.

command.py    how a command ends
models.py     models of equal size
tables.py     which runs make each table
lengths.py    models of a table asked at lengths they never learned
kept.py       what of it stays in results/
figures.py    accuracy by the number of pairs
binding.py    what the memories of a table hold where keys are given
"""
