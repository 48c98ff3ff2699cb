"""Models to ask: a server with OpenAI's API, scripted answers, recorded ones."""
