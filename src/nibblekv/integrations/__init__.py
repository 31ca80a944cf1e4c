"""Bridges to inference engines. Nothing else in the package imports from here."""
