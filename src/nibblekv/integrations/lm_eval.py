"""A model for lm-eval-harness whose cache has a format, so that any of its tasks can be run with it.

    python -m nibblekv.integrations.lm_eval --model nibblekv --tasks gsm8k \
        --model_args pretrained=MODEL,format=int4+w32s4

takes the arguments of `lm_eval`; in a program, import this module and ask for the model `nibblekv`.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from nibblekv.models import DEMO_MODELS, fetch_demo_model
from nibblekv.peers import cache_argument, cache_maker, check_format

__all__ = ["FormatLM", "main"]


@register_model("nibblekv")
class FormatLM(HFLM):
    """lm-eval's `hf` model, decoder-only, with a cache of one format in every forward and every `generate`."""

    def __init__(self, pretrained: Any, format: str = "int4", strict: bool = True, **arguments: Any) -> None:
        """Load the model.

        Args:
            pretrained: as of lm-eval's `hf` model, or a name in `nibblekv.models.DEMO_MODELS`.
            format: a name as `nibblekv.peers` lists them.
            strict: every key and value that attention reads is the stored one, the prompt's own included. Tasks that score
                given answers are one prompt: with False they hardly read the cache.
            arguments: of lm-eval's `hf` model.

        Raises:
            NotImplementedError, ValueError: the model cannot use the format.
        """
        check_format(format)
        if pretrained in DEMO_MODELS:
            pretrained = str(fetch_demo_model(pretrained))
        super().__init__(pretrained, backend="causal", **arguments)
        self.format = format
        self.strict = strict
        with cache_maker(self.model, format, strict=strict):
            pass  # refuses before the first request what it can

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        with torch.inference_mode(), cache_maker(self.model, self.format, strict=self.strict) as make_cache:
            return self.model(inps, **cache_argument(self.model, make_cache())).logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **arguments: Any) -> torch.Tensor:
        with cache_maker(self.model, self.format, strict=self.strict) as make_cache:
            cache = cache_argument(self.model, make_cache())
            return super()._model_generate(context, max_length, stop, **cache, **arguments)


def main() -> None:
    """Run lm-eval's command line, which then knows the model `nibblekv`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
