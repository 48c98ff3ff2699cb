"""`jobs` and `plan`."""
