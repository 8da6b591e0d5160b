"""What loads wait for: fetches from behind the arena, and what other steps store."""
