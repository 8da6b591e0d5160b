"""The engines behind the proxy: who they are, who is well, who gets the next request."""
