"""Tinker's client against our gateway: scripts of it, and what they meet there."""
