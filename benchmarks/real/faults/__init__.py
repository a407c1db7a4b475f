"""`headway bench faults`: a Headway in parts, whose parts die, pause and lose each other under load."""
