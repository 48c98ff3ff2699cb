"""Training sessions: ranks that stay, with model and optimizer in memory, from job to job."""
