"""GPU containers run on an engine to prove that it works."""
