"""vlmserve behind LangChain: a chain of a prompt with an image, the model, and a parser.

pip install langchain-openai
python examples/langchain_chat.py examples/shapes.png "What colour is the circle?"
"""

import argparse
import base64
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pixie")
    given = parser.parse_args(arguments)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,{image}"}}
    prompt = ChatPromptTemplate([("human", [image, {"type": "text", "text": "{question}"}])])
    model = ChatOpenAI(base_url=given.url, api_key="unused", model=given.model, temperature=0)
    chain = prompt | model | StrOutputParser()
    encoded = base64.b64encode(given.image.read_bytes()).decode()
    print(chain.invoke({"image": encoded, "question": given.question}))


if __name__ == "__main__":
    main()
