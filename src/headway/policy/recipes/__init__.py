"""Recipes: named pairs of a planner and a packer."""
