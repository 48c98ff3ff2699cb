"""Platform commands: `up`, `down`, `status`, `keys`, `doctor`; and the platform process."""
