"""The hop between arena and backend: transfers, the lane that moves them, and how much one call should move."""
