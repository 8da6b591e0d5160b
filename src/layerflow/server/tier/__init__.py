"""What lies behind the arena, as the server sees it."""
