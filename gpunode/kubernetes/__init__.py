"""The API server: a few objects and verbs, and the only client library that connects to it (client.py)."""
