"""What is asked: tasks for training and for evaluation, as pure functions and tables."""
