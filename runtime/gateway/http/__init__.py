"""The gateway as an HTTP server: application, keys and roles, bodies, errors, metrics."""
