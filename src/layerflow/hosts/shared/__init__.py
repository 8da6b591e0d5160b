"""What backends of shared stores have in common."""
