"""The threads of a host: what they have in common, and one file each."""
