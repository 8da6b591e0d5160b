"""What each path of the proxy answers."""
