"""The threads that copy between engine memory and the arena."""
