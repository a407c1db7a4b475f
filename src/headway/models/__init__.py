"""How are a model's files made?"""
