"""Who computes?"""
