"""Files on a shared disk: written whole or not at all, checksummed, and appended in groups."""
