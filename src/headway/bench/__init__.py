"""Was it on time?"""
