"""Host processes: what runs between the arena and a pool behind it. Native libraries live here and nowhere else."""
