"""`headway up`: gateways, controllers and agents on the nodes of a Ray cluster."""
