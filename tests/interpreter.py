"""Triton's interpreter, made to run with the numpy of today."""

from __future__ import annotations

from typing import Any


def take_numpy_2_4(set_attribute: Any = setattr) -> None:
    """Let one-element arrays stand for loop bounds: Triton 3.6's interpreter converts them by int(), numpy 2.4 refuses.

    Args:
        set_attribute: as `setattr`; a test passes that of its `monkeypatch`.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    set_attribute(interpreter, "_patch_lang_tensor", patch)
