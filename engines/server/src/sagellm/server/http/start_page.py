"""GET /: one static page for browsers: what this server is, and how to send it a request."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from shlex import quote

from starlette.requests import Request
from starlette.responses import Response

_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_STYLE = (
    "body{max-width:52rem;margin:4rem auto;padding:0 1rem;font:1rem/1.5 system-ui,sans-serif}"
    "dt{font-weight:600}dd{margin:0 0 1rem}"
    "pre{padding:1rem;border:1px solid;border-radius:.4rem;white-space:pre-wrap;overflow-wrap:anywhere}"
    ":root{color-scheme:light dark}"
)
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>sageLLM</title>
<style>{style}</style>
</head>
<body>
<h1>sageLLM</h1>
<p>This server has an HTTP API for OpenAI clients. There is no other page.</p>
<dl>
<dt>Model</dt><dd>{model}</dd>
<dt>Base URL</dt><dd><code>{base_url}</code></dd>
</dl>
<pre>{curl}</pre>
</body>
</html>
"""


class StartPage:
    """Shows the model's name only if no API key is needed to learn it. Never calls the engine."""

    def __init__(self, model_name: str, *, needs_key: bool, has_template: bool) -> None:
        self._needs_key = needs_key
        self._model = (
            "its name is at <code>/v1/models</code>, for those with an API key"
            if needs_key
            else f"<code>{escape(model_name)}</code>"
        )
        self._path = "/chat/completions" if has_template else "/completions"
        text = {"messages": [{"role": "user", "content": "Hello"}]} if has_template else {"prompt": "Hello"}
        self._body = json.dumps({**text, "max_tokens": 64})

    async def show(self, request: Request) -> Response:
        """Return the page, with the address that the browser used."""
        host = request.headers.get("host", "")
        base_url = f"{request.url.scheme}://{host if _HOST.fullmatch(host) else 'HOST'}/v1"
        lines = [f"curl {quote(base_url + self._path)}", '-H "Content-Type: application/json"']
        if self._needs_key:
            lines.append('-H "Authorization: Bearer $API_KEY"')
        lines.append(f"-d {quote(self._body)}")
        page = _PAGE.format(
            style=_STYLE,
            model=self._model,
            base_url=escape(base_url),
            curl=escape(" \\\n  ".join(lines)),
        )
        return Response(page, media_type="text/html", headers=_HEADERS)
