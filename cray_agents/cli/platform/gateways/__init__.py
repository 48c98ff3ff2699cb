"""Gateways of `up`: their sockets and shared port, and the processes of further ones."""
