"""Facts about this node: pure parsers of captured text, and `Node`, the lazily read snapshot."""
