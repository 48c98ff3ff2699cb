"""The platform process of `up`: its parts wired together, its tasks, and the commands about it."""
