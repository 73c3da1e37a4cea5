"""Simulated nodes, for schedulers and clusters under test."""
