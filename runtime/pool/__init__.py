"""The replicas: which version each one serves, and how that changes with no request lost."""
