"""gpunode: from "driver installed" to proven GPU containers on one Linux node."""

__version__ = "0.1.0"
