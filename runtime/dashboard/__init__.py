"""Dashboard: the pages of the platform, served as files; their sources are in ui/ of a checkout."""
