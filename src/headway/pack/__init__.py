"""What runs in the next iteration?"""
