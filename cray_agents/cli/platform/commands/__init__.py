"""Commands about the platform: `up`, `down`, `status`, `keys`, `doctor`, `goodput`, `simulate`."""
