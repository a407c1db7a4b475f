"""A real vLLM: started, fed, scheduled and supervised by Headway."""
