"""Rewrites from the canonical graph to a target's ops, one a file."""
