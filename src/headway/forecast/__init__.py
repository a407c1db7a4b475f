"""How long will it take?"""
