"""Clients that query a running container daemon: Docker's HTTP API and the CRI, both over a unix socket."""
