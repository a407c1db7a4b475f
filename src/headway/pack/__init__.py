"""Packers: what runs in the next iteration?"""
