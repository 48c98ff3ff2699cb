"""Files and uploads of OpenAI's API, over contents that are stored once each."""
