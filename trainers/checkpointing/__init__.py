"""Resume points, and the published checkpoint."""
