"""MIG layouts: the current one, the desired one, the steps between them, and the rollback."""
