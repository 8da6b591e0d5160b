"""What this server finds at others: connections to them, what they offer, and the source of objects that this makes."""
