"""Placement: which of the free devices a container should get."""
