"""Which instance, in what order?"""
