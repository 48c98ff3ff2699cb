"""Selection: the decision on each run, by its facts, its tokens and the other runs of its task."""
