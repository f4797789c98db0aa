"""Training: from a frozen configuration to a folder with a model, killed and resumed at will."""
