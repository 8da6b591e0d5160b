"""Where objects live: the arena, its directory and eviction, and the contract that every backend keeps."""
