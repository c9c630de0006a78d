"""Two API keys over a store that outlives the engine: neither gets KV of the other one, from any tier."""

from __future__ import annotations

import asyncio

import pytest

from sagellm.testing.patience import PATIENCE_S

NUM_TOKENS, BLOCK_SIZE = 512, 16
PROMPT = [5 + 7 * index % 400 for index in range(NUM_TOKENS)]
REUSABLE = NUM_TOKENS - BLOCK_SIZE  # the last token is computed, and blocks come back whole


@pytest.mark.parametrize("where", ["file", "redis", "file over redis"])
def test_a_restarted_server_gives_stored_kv_only_to_the_key_that_computed_it(serve, tmp_path, request, where):
    stores = {
        "file": {
            "max_bytes": "1MiB" if "over" in where else "16MiB",
            "folder": str(tmp_path),
            "name": "kept",
        },
        "redis": {"max_bytes": "64MiB", "prefix": f"stores-{len(where)}", "timeout_s": PATIENCE_S},
    }
    if "redis" in where:
        stores["redis"]["url"] = request.getfixturevalue("redis_url")
    settings = {
        "num_blocks": 3 * NUM_TOKENS // BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "kv_tiers": {name: stores[name] for name in where.split(" over ")},
        "kv_fetch": "always",
    }

    def start():
        server = serve(engine=settings, api_keys=("one", "two"))

        def ask(key, **fields):
            body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            answer = server.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            answer = answer.json()
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        return server, ask

    server, ask = start()
    expected, num_cached = ask("one")
    assert num_cached == 0
    for other in range(3):  # what the key has is evicted for these, and so goes to the store
        ask("one", prompt=[6 + (other + 11 * index) % 400 for index in range(2 * NUM_TOKENS)])
    server.stop()
    asyncio.run(server.front.close())

    _, ask = start()
    assert ask("two") == (expected, 0)
    assert ask("one", cache_salt="narrower") == (expected, 0)
    assert ask("one") == (expected, REUSABLE)
    text, num_cached = ask("two")
    assert text == expected
    assert num_cached >= REUSABLE, "within the tenant it is shared"
