"""A leg is one HTTP call to one engine: the prefill's, or the decode's."""
