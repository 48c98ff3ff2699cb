"""Bounds of every input of the gateway, in one place.

What is larger is refused before it is read, parsed or sent on.
"""
