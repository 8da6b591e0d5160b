"""Steps whose loads are planned by their hits: where their objects lie, and how they begin and end without a server."""
