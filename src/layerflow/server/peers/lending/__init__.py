"""What this server lends of its arena: to which readers, under which leases, and the exporter that they read from."""
