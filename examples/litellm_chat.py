"""vlmserve behind LiteLLM, which gives many servers one interface.

pip install litellm
python examples/litellm_chat.py examples/shapes.png "What colour is the circle?"
"""

import argparse
import base64
from pathlib import Path

import litellm


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": given.question},
    ]
    answer = litellm.completion(
        model=f"hosted_vllm/{given.model}",  # vlmserve has vLLM's API
        api_base=given.url,
        api_key="unused",
        temperature=0,
        messages=[{"role": "user", "content": content}],
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
