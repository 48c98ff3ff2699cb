"""OpenAI's files and uploads, over contents that are stored once each."""
