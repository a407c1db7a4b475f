"""An endpoint picker for Envoy: names the engine of each request that a proxy sends (docs/picker.md)."""
