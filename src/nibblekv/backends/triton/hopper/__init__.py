"""Decode attention, the write and the rotation for Hopper (compute capability 9.0), beside the portable kernels."""

from nibblekv.backends.triton.hopper.launch import decode, supports
from nibblekv.backends.triton.hopper.rotation import rotate, rotate_supports
from nibblekv.backends.triton.hopper.write import write_rows, write_supports

__all__ = ["decode", "rotate", "rotate_supports", "supports", "write_rows", "write_supports"]
