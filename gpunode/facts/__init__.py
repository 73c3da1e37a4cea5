"""What is so on this node: pure parsers over captured text, and `Node`, the lazily read snapshot."""
