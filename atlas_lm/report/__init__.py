"""What a memory did, shown to people."""
