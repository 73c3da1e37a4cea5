"""The Kubernetes device plugin: thin RPC handlers over pure policy. serve.py connects all parts."""

import os

# Read by gRPC when it is first imported. Its fork handlers can hang a process that spawns children
# (grpc/grpc#17986), and ours exec at once; errors are reported here, with our own messages, and a client's
# malformed frame isn't worth a log line.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
