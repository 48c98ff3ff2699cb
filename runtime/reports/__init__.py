"""Reports: Markdown that people and agents write about a platform, whose quotes are verified."""
