"""Who is attached: sessions, and the clients that have them."""
