"""Headway on several machines: messages between its parts, Ray, and work outside the engines."""
