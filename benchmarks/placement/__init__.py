"""Where requests go in a fleet of engines with prefix caches: grounds, other routers, figures."""
