"""Commands of `runs`: list, show, compare, reward, check and prune what is stored."""
