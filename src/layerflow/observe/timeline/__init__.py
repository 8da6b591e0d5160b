"""Step traces as a page of HTML."""
