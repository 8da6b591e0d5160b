"""The hop between arena and backend: the lane that moves its transfers, and how much one call should move."""
