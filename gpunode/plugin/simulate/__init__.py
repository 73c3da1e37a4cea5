"""Nodes that aren't there, for schedulers and clusters under test."""
