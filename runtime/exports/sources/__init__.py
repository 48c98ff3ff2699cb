"""Sources: the items of an export in a fixed order, from the store or from a dataset."""
