"""What the engine tests run, one process and one engine each: `python scenarios.py NAME CONFIG.json RESULT.json`.

The configuration's "engine" entry goes to `vllm.LLM`; results are plain JSON, floats in full.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POISON = 0xFF  # code 15, and a scale word that is NaN


def make_engine(config: dict[str, Any]) -> Any:
    """Build the engine of a configuration, small enough for any machine."""
    from vllm import LLM

    from nibblekv.integrations import vllm as plugin

    if config.get("triton_backend"):
        # The GPU's classes, given tensors of a CPU: all but the kernels is the same code.
        plugin.BACKENDS["CPU_ATTN"] = plugin.BACKENDS["TRITON_ATTN"]
    settings = {
        "enforce_eager": True,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": False,
    }
    return LLM(**settings | config["engine"])


def attention_layers(llm: Any) -> dict[str, Any]:
    """Return the model's attention layers by name."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.compilation_config.static_forward_context


def counters(llm: Any) -> dict[str, float]:
    """Return the engine's counters that the tests look at."""
    wanted = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits")
    return {metric.name: metric.value for metric in llm.get_metrics() if metric.name in wanted}


def describe(llm: Any) -> dict[str, Any]:
    """Return what the engine says of its cache."""
    cache = llm.llm_engine.vllm_config.cache_config
    layers = [layer for layer in attention_layers(llm).values() if hasattr(layer, "impl")]
    layer = layers[0]
    return {
        "impl": f"{type(layer.impl).__module__}.{type(layer.impl).__name__}",
        "ours": [layer.impl.is_ours for layer in layers if hasattr(layer.impl, "is_ours")],
        "tokens": cache.num_gpu_blocks * cache.block_size,
        "cache_shape": list(layer.kv_cache.shape),
    }


def generate(llm: Any, prompts: list[list[int]], together: bool = True, **sampling: Any) -> list[Any]:
    """Return [token ids, log-probabilities of the best two] for each sample of each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 16, "logprobs": 2, "ignore_eos": True, "detokenize": False} | sampling
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    batches = [requests] if together else [[request] for request in requests]
    outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
    return [
        [[list(o.token_ids), [sorted(p.logprob for p in step.values()) for step in o.logprobs]] for o in output.outputs]
        for output in outputs
    ]


def make_exact() -> None:
    """Make the matrix products of the engine to come independent of the batch's shape: in float64, rounded once.

    With the plugin's strict mode, a request then gives the same bits whatever shares its steps and however it is cut.
    """
    import vllm.model_executor.layers.utils as utils

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(
                x.dtype
            )

        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def prompts_of(lengths: list[int], shared: int) -> list[list[int]]:
    """Return random prompts, every other one beginning with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randint(1, 500, (shared,), generator=generator).tolist()
    bodies = [torch.randint(1, 500, (n,), generator=generator).tolist() for n in lengths]
    return [head + body if i % 2 else body for i, body in enumerate(bodies)]


LENGTHS, SHARED = [37, 5, 64, 18, 90, 33, 16, 71], 48


def pressure(config: dict[str, Any]) -> dict[str, Any]:
    """Run the same requests together and alone; `poison` fills every block with 0xFF at the moment that it is freed."""
    make_exact()
    llm = make_engine(config)
    prompts = prompts_of(LENGTHS, SHARED)
    freed = poison_freed_blocks(llm) if config.get("poison") else None
    result = describe(llm)
    for name in config["runs"]:
        if name == "together":
            result[name] = generate(llm, prompts)
        elif name == "alone":
            result[name] = generate(llm, prompts, together=False)
        elif name == "sampled":
            # Seeded sampling of chunked prompts fails in vLLM on CPU (its generators have no offset): four greedy samples.
            result[name] = generate(llm, prompts[:2], n=4, temperature=1.0, top_k=1)
        elif name == "beams":
            result[name] = beams(llm, prompts[:1])
        else:
            result[name] = generate(llm, prompts[: int(name)])
    return result | counters(llm) | {"freed_blocks": 0 if freed is None else len(freed)}


def beams(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Return the tokens of a beam search."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [[list(sequence.tokens) for sequence in output.sequences] for output in outputs]


def poison_freed_blocks(llm: Any) -> list[int]:
    """Overwrite a block in every layer whenever the engine's last user of it lets it go; return the list of such blocks."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    caches = [layer.kv_cache for layer in attention_layers(llm).values()]
    freed: list[int] = []
    free = pool.free_blocks

    def free_and_poison(ordered_blocks, *args, **kwargs):
        blocks = list(ordered_blocks)
        free(blocks, *args, **kwargs)
        for block in blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                freed.append(block.block_id)
                for cache in caches:
                    cache[block.block_id].fill_(POISON)

    pool.free_blocks = free_and_poison
    return freed


def chat(config: dict[str, Any]) -> dict[str, Any]:
    """Ask a real model a question and describe its cache."""
    from vllm import SamplingParams

    llm = make_engine(config)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat([messages], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    return describe(llm) | {"answer": output[0].outputs[0].text}


def numerics(config: dict[str, Any]) -> dict[str, Any]:
    """Compare each layer's attention output, at every step, with float64 attention over the raw keys and the stored pages.

    Keeps a shadow of the raw keys and values by slot; the oracle reads `quantize` then `dequantize` of the shadow (with a
    calibration, mapped before and back behind), so it shares neither pages nor views with the plugin, and the shadow itself
    where a window says so. `raw_errors` are those of the same outputs beside attention over the shadow alone.
    """
    from nibblekv import dequantize, quantize
    from nibblekv.integrations.vllm.attention import QuantizedAttention

    shadow: dict[tuple[int, int], list[torch.Tensor]] = {}
    errors: list[float] = []
    raw_errors: list[float] = []
    norms: list[float] = []
    write, attend = QuantizedAttention.nibblekv_write, QuantizedAttention.nibblekv_attend

    def shadow_write(self, layer, key, value, kv_cache, slot_mapping):
        write(self, layer, key, value, kv_cache, slot_mapping)
        layout = self.nibblekv_layout(layer, kv_cache)
        rows = (key[: len(slot_mapping)], value[: len(slot_mapping)])
        calibration = self.nibblekv_calibration
        mapped = rows if calibration is None else calibration.stored(*rows)
        stored = [
            dequantize(*quantize(x, fmt, role=role), fmt)
            for role, x, fmt in zip(("key", "value"), mapped, (layout.k_format, layout.v_format), strict=True)
        ]
        if calibration is not None:
            stored = calibration.restored(*stored)
        for i, slot in enumerate(slot_mapping.tolist()):
            shadow[kv_cache.data_ptr(), slot] = [kept[i].double() for kept in (*stored, *rows)]

    def checked_attend(self, layer, query, key, value, kv_cache, metadata, output, output_scale, options):
        output.fill_(torch.nan)
        attend(self, layer, query, key, value, kv_cache, metadata, output, output_scale, options)
        starts, size = metadata.query_start_loc.tolist(), kv_cache.shape[2]
        split, settings = metadata.nibblekv_split, self.nibblekv_settings
        for b, length in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[b], starts[b + 1]
            slots = [int(metadata.block_table[b, p // size]) * size + p % size for p in range(length)]
            k, v, raw_k, raw_v = (torch.stack([shadow[kv_cache.data_ptr(), s][i] for s in slots]) for i in range(4))
            group = query.shape[1] // k.shape[1]
            k, v, raw_k, raw_v = (rows.repeat_interleave(group, 1) for rows in (k, v, raw_k, raw_v))
            q, past = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)[None]
            unquantized = q - past < settings.window
            if split is not None and b >= split.num_decodes and not settings.strict:
                unquantized = unquantized | (past >= length - (end - begin))
            scores = [torch.einsum("qhd,khd->hqk", query[begin:end].double(), rows) for rows in (k, raw_k)]
            score = torch.where(unquantized, scores[1], scores[0]) * self.nibblekv_options["softmax_scale"]
            weight = torch.softmax(score.masked_fill(past > q, -torch.inf), -1)
            expected = torch.einsum("hqk,khd->qhd", weight * ~unquantized, v)
            expected = expected + torch.einsum("hqk,khd->qhd", weight * unquantized, raw_v)
            errors.append(float((output[begin:end].double() - expected).norm() / expected.norm()))
            weight = torch.softmax(
                (scores[1] * self.nibblekv_options["softmax_scale"]).masked_fill(past > q, -torch.inf), -1
            )
            unpacked = torch.einsum("hqk,khd->qhd", weight, raw_v)
            raw_errors.append(float((output[begin:end].double() - unpacked).norm() / unpacked.norm()))
            norms.append(float(expected.norm()))

    QuantizedAttention.nibblekv_write = shadow_write
    QuantizedAttention.nibblekv_attend = checked_attend
    llm = make_engine(config)
    generate(llm, prompts_of(LENGTHS[:4], SHARED), max_tokens=6)
    return describe(llm) | {"errors": errors, "raw_errors": raw_errors, "least_norm": min(norms)}


def offload(config: dict[str, Any]) -> dict[str, Any]:
    """Ask, drive the answer's pages out of the pool, and ask again: they come back from where a connector kept them."""
    llm = make_engine(config)
    prompts = prompts_of(LENGTHS, SHARED)
    first = generate(llm, prompts[7:])
    generate(llm, [[token + 1 for token in prompt] for prompt in prompts])
    before = counters(llm)
    return describe(llm) | {"first": first, "again": generate(llm, prompts[7:]), "before": before, "after": counters(llm)}


SCENARIOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "chat": chat,
    "numerics": numerics,
    "offload": offload,
    "pressure": pressure,
}

if __name__ == "__main__":
    result = SCENARIOS[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(result))
