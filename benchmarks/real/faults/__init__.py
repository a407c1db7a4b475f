"""`headway bench faults`: a Headway cluster whose processes die, pause and lose their connections under load."""
