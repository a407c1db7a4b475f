"""Whose KV lives where?"""
