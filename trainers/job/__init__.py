"""A training job: submitted, launched, watched, restarted; its ranks and its folder."""
