"""Views: what pages, people and scripts look at, computed from the records of a root."""
