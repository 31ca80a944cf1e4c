"""vLLM's OpenAI server over loopback with nibblekv's cache."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import environment

import nibblekv

START_SECONDS = 240
README = Path(__file__).parent.parent.parent / "README.md"


@pytest.fixture(scope="module")
def server(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server, yield its address and its log, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # The arguments of the README's line as they stand, and what makes it small. Not through the command `vllm`: it asks for
    # the metadata of a package of that name, which CPU builds do not have.
    arguments = re.search(r"^vllm serve MODEL (.*)$", README.read_text(), re.MULTILINE)[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2, *arguments.split()]
    command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(32 << 20), "--gpu-memory-utilization", "0.3"]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask(server: str, **fields: object) -> str:
    """Return the body of a chat completion."""
    question = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    body = json.dumps({"model": "smollm2", **question, **fields}).encode()
    request = urllib.request.Request(f"{server}/v1/chat/completions", body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120).read().decode()


@pytest.mark.models
def test_chat_completion_and_streaming_say_the_same(server):
    """Catches a plugin that is active in the engine's tests and not in the server's processes."""
    address, log = server
    whole = json.loads(ask(address))["choices"][0]["message"]["content"]
    assert "Paris" in whole
    events = [line[6:] for line in ask(address, stream=True).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert len(pieces) > 3
    assert "".join(pieces) == whole
    assert "nibblekv stores the KV cache of int4_per_token_head as int4 keys and int4 values" in log.read_text()
    metrics = urllib.request.urlopen(f"{address}/metrics", timeout=10).read().decode()
    assert 'cache_dtype="int4_per_token_head"' in metrics
    assert f'kv_cache_backend="nibblekv {nibblekv.__version__}"' in metrics
