"""How models and memories are scored, run and compared."""
