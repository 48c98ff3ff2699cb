"""Scans: what the platform itself can look for in stored runs, and how versions differ in it."""
