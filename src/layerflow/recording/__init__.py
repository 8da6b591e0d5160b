"""What happened in a server, in a file: its format, who writes it and who reads it."""
