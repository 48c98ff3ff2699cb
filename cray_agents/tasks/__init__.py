"""Task sets: tasks read from files, in splits without leaks."""
