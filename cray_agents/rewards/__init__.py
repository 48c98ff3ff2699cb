"""Rewards: functions of a run, and a model as the judge."""
