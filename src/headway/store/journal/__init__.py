"""The journal: one row per request that ended, and the engines' iterations, in a bounded folder of files."""
