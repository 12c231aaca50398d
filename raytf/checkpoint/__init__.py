"""Bytes on any fsspec URL. Neither TensorFlow nor Ray."""
