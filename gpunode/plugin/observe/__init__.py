"""Observability of a running plugin: metrics, health endpoints, the status file."""
