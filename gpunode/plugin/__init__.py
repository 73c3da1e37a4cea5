"""The Kubernetes device plugin: thin RPC handlers over pure policy. The whole way is in serve.py."""

import os

# Read by gRPC when it is first imported. Its fork handlers can hang a process that spawns children
# (grpc/grpc#17986), and ours exec at once; what goes wrong is reported here, in our own words.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
