"""MIG layouts: what is, what is wanted, the way from one to the other, and back."""
