"""Adapters to inference engines, one module each; none is imported unless its user asks for it."""
