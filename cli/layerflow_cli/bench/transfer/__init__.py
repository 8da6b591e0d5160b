"""How fast bytes move: in the arena, to a device, over a link to another server."""
