"""The invariants, checked after every event in tests."""
