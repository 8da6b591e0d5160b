"""What reaches the server: the control socket, the socket that passes the arena, HTTP."""
