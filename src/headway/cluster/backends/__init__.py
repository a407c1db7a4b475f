"""What serves units outside the LLM: sandboxes, models in processes of their own, others by plug-in."""
