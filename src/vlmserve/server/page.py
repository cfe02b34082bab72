"""The page at ``/``."""

from __future__ import annotations

import html
import json

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>vlmserve</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem }}
  pre {{ background: #f4f4f4; color: #111; padding: 1rem; overflow-x: auto; border-radius: 6px }}
</style>
<h1>vlmserve</h1>
<p>This server answers questions about pictures over an OpenAI-compatible API. It serves <b>{model}</b>.</p>
<p>Ask about a picture:</p>
<pre>{command}</pre>
<p>Also here: <a href="openapi.json">the API's description</a>, <a href="v1/models">models</a>,
<a href="health">health</a>, <a href="metrics">metrics</a>.</p>
</html>
"""


def start_page(model: str, base_url: str) -> str:
    """HTML that says what runs here and how to ask it. base_url: as the visitor sees it, without a last slash."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,PICTURE"}}
    question = {"type": "text", "text": "What is in the picture?"}
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": [picture, question]}]}, indent=1)
    body = body.replace("PICTURE", "$(base64 < picture.png | tr -d '\\n')")
    url = f"{base_url}/v1/chat/completions"
    command = f"curl {url} -H 'Content-Type: application/json' --data-binary @- << END\n{body}\nEND"
    return _PAGE.format(model=html.escape(model), command=html.escape(command))
