"""`demo` and `loop`."""
