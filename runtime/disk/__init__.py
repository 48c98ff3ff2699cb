"""Files on a shared disk: whole or absent, checksummed, appended in groups, removed whole."""
