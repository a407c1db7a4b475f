"""The three sides of Headway in processes of their own: gateways, controllers, agents."""
