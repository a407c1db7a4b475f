"""`headway gateway`, `controller` and `agent`: the parts of Headway as processes of their own."""
