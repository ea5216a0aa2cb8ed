"""The memory hierarchy made visible."""
