"""`up`, `down`, `status`, `keys`, `doctor`; and the platform process that they start."""
