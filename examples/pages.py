"""A question about each page of a PDF.

python examples/pages.py examples/shapes.pdf "What shape is there?"
"""

import argparse
import base64
from pathlib import Path

from openai import BadRequestError, OpenAI


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    client = OpenAI(base_url=given.url, api_key="unused")
    encoded = base64.b64encode(given.document.read_bytes()).decode()
    page = 1
    while True:
        file = {"file_data": f"data:application/pdf;base64,{encoded}", "filename": given.document.name}
        part = {"type": "file", "file": file, "pages": str(page)}
        content = [part, {"type": "text", "text": given.question}]
        try:
            answer = client.chat.completions.create(
                model=given.model, temperature=0, messages=[{"role": "user", "content": content}]
            )
        except BadRequestError as error:
            if page == 1:
                raise
            print(f"({error.body['message']})")
            return  # there is no such page
        print(f"page {page}: {answer.choices[0].message.content}")
        page += 1


if __name__ == "__main__":
    main()
