"""Decode attention and the write for Hopper (compute capability 9.0), kept beside the portable backend for the pages that
they are made for."""

from nibblekv.backends.triton.hopper.launch import decode, supports
from nibblekv.backends.triton.hopper.write import write_rows, write_supports

__all__ = ["decode", "supports", "write_rows", "write_supports"]
