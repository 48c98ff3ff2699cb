"""Platform client: use a running platform over HTTP."""
