"""An endpoint picker for Envoy: it names the engine for each request of a proxy (docs/picker.md)."""

import os

# gRPC's fork handlers are for child processes that use gRPC; the gateway's children run another program at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
