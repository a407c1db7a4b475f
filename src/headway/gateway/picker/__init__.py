"""An endpoint picker for Envoy: names the engine of each request that a proxy sends (docs/picker.md)."""

import os

# gRPC's handlers of forks are for children that use gRPC; the gateway's begin another program at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
