"""Task sets: read from files, held apart in splits."""
