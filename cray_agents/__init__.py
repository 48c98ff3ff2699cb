"""Agents that train themselves. See README.md; each public name's docstring says how to use it."""
