"""A training job: submission, launch, restarts, ranks, and the job's folder."""
