"""nibblekv: a 4-bit KV cache that is exact, fast and drop-in."""

from nibblekv.backends import available_backends
from nibblekv.formats import FORMATS, QuantFormat
from nibblekv.layout import KVCacheLayout
from nibblekv.ops import dequantize, gather_and_dequantize, paged_attention, quantize, reshape_and_cache
from nibblekv.options import AttentionOptions

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "AttentionOptions",
    "KVCacheLayout",
    "QuantFormat",
    "available_backends",
    "dequantize",
    "gather_and_dequantize",
    "paged_attention",
    "quantize",
    "reshape_and_cache",
]
