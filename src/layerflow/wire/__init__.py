"""The control protocol: messages and their codec, imported by both ends."""
