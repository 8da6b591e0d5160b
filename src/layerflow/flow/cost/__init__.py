"""What a load would cost, and whether it is worth it."""
