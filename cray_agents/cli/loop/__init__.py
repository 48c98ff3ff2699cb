"""Commands that train an agent: `demo` and `loop`."""
