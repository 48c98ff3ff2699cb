"""Engines: a server with OpenAI's API, scripted answers, recorded answers."""
