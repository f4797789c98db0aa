"""The demo: facts hidden in a book, a small model that reads it once, and what it answers."""
