"""The API server: a few objects and verbs, and the only client library that speaks to it (client.py)."""
