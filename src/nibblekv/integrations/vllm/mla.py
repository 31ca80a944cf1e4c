"""vLLM's MLA backends on CPU, as they are, but for one check: they would take a per-token-head dtype for their own bytes.

On a GPU no MLA backend lists these dtypes, and vLLM refuses them itself.
"""

from __future__ import annotations

import importlib
from typing import Any

from nibblekv.integrations.vllm.settings import DTYPES

_BASES = {
    "NibbleKVCPUMLABackend": ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLABackend"),
    "NibbleKVAMXMLABackend": ("vllm.v1.attention.backends.mla.amx_mla", "AMXMLABackend"),
}


def __getattr__(name: str) -> Any:
    """Make a class of `_BASES` when vLLM asks for it: a release has only those that its table names."""
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _BASES[name]
    base = getattr(importlib.import_module(module), attribute)
    globals()[name] = type(name, (base,), {"__module__": __name__, "get_impl_cls": staticmethod(lambda: _refusing(base))})
    return globals()[name]


def _refusing(backend: Any) -> Any:
    """Return a backend's implementation class with a check before its constructor."""
    implementation = backend.get_impl_cls()

    class RefusingImpl(implementation):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: Any,
            sliding_window: Any,
            kv_cache_dtype: str,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if kv_cache_dtype in DTYPES:
                raise NotImplementedError(
                    f"kv_cache_dtype: expected 'auto' for a model with multi-head latent attention (MLA), which stores "
                    f"latent vectors and no keys and values by head, got {kv_cache_dtype!r}"
                )
            super().__init__(
                num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *args, **kwargs
            )

    return RefusingImpl
