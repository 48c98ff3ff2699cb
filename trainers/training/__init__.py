"""A training step over ranks: the model's part on each, its optimizer, their process groups."""
