"""Kubernetes objects as plain JSON trees, each made by a pure function."""
