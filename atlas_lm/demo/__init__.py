"""The demo: facts hidden in a book, a small model that reads it once, and what it answers."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The folder of its model."""
WINDOW = Path(__file__).parent / "window"
"""That of a transformer to compare with."""
SHIPPED = {"demo": MODEL, "demo-window": WINDOW}
"""What may be said instead of their folders."""
