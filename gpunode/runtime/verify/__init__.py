"""GPU containers that verify an engine."""
