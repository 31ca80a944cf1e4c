"""Decode attention for Hopper (compute capability 9.0), kept beside the portable backend for the pages it is made for."""

from nibblekv.backends.triton.hopper.launch import decode, supports

__all__ = ["decode", "supports"]
