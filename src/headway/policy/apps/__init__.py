"""LLM applications (Hermes): which work does a run still have to do, and what will it need next?"""
