"""What goes wrong, what it means and what to do about it. Neither TensorFlow nor Ray."""
