"""Rewards: functions of a run, and models as judges."""
