"""Commands about the platform: `up`, `down`, `status`, `keys`, `goodput`, `cost`, and more."""
