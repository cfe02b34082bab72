"""Phrasings of all questions, and small variations of how people type them."""

from __future__ import annotations

import random
import re
from typing import Final

#: With a preposition, so that "What is {at}?" reads well; one row for each place.
AT_PLACE: Final[tuple[tuple[str, ...], ...]] = (
    ("in the top left", "in the top left", "in the top left corner", "in the upper left", "in the upper left corner"),
    ("at the top", "at the top", "at the top of the picture"),
    (
        "in the top right",
        "in the top right",
        "in the top right corner",
        "in the upper right",
        "in the upper right corner",
    ),
    ("on the left", "on the left", "on the left side", "at the left"),
    ("in the middle", "in the middle", "in the centre", "in the center", "in the middle of the picture"),
    ("on the right", "on the right", "on the right side", "at the right"),
    ("in the bottom left", "in the bottom left", "in the bottom left corner", "in the lower left"),
    ("at the bottom", "at the bottom", "at the bottom of the picture"),
    ("in the bottom right", "in the bottom right", "in the bottom right corner", "in the lower right"),
)

WHAT_AT: Final = (
    "What is {at}?",
    "What is {at}?",
    "What's {at}?",
    "What do you see {at}?",
    "What can you see {at}?",
    "Which object is {at}?",
    "What object is {at}?",
    "What is there {at}?",
    "Tell me what is {at}.",
    "Name the object {at}.",
    "What is shown {at}?",
)
COLOUR_AT: Final = (
    "What colour is the object {at}?",
    "What colour is the shape {at}?",
    "What is the colour of the object {at}?",
    "Which colour is the object {at}?",
    "Which colour does the object {at} have?",
    "What colour is the thing {at}?",
    "Tell me the colour of the object {at}.",
    "Name the colour of the shape {at}.",
)
SHAPE_AT: Final = (
    "What shape is {at}?",
    "Which shape is {at}?",
    "What shape is the object {at}?",
    "What is the shape of the object {at}?",
    "Which shape does the object {at} have?",
    "What kind of shape is {at}?",
    "Tell me the shape of the object {at}.",
    "Name the shape {at}.",
)
COLOUR_OF: Final = (
    "What colour is the {what}?",
    "Which colour is the {what}?",
    "What is the colour of the {what}?",
    "What colour does the {what} have?",
    "Which colour does the {what} have?",
    "Tell me the colour of the {what}.",
    "Name the colour of the {what}.",
    "The {what} is which colour?",
)
SHAPE_OF: Final = (
    "What shape is the {what}?",
    "Which shape is the {what}?",
    "What is the shape of the {what}?",
    "What shape does the {what} have?",
    "Which shape does the {what} have?",
    "What kind of shape is the {what}?",
    "Tell me the shape of the {what}.",
    "Name the shape of the {what}.",
)
HOW_MANY: Final = (
    "How many {what} are there?",
    "How many {what} are there?",
    "How many {what} are in the picture?",
    "How many {what} do you see?",
    "How many {what} can you see?",
    "How many {what} does the picture show?",
    "Count the {what}.",
    "Count the {what} in the picture.",
    "What is the number of {what}?",
    "Tell me how many {what} there are.",
)
DESCRIBE: Final = (
    "Describe the picture.",
    "Describe the picture.",
    "Describe this picture.",
    "What is in the picture?",
    "What is in the picture?",
    "What is in this picture?",
    "What's in the picture?",
    "What do you see?",
    "What do you see in the picture?",
    "What can you see?",
    "What does the picture show?",
    "What is shown in the picture?",
    "What is this?",
    "What is this a picture of?",
    "Tell me what is in the picture.",
)
DESCRIBE_OBJECTS: Final = (
    "Which objects are there?",
    "Which objects are in the picture?",
    "What objects are in the picture?",
    "What objects do you see?",
    "List the objects.",
    "List the objects in the picture.",
    "Name all objects in the picture.",
    "What shapes are in the picture?",
)
WHICH_COLOURS: Final = (
    "Which colours are there?",
    "Which colours are there?",
    "What colours are there?",
    "Which colours do you see?",
    "What colours are in the picture?",
    "Which colours are in the picture?",
    "List the colours.",
    "Name all colours in the picture.",
)
WHICH_NUMBER: Final = (
    "What number is written?",
    "What number is this?",
    "Which number is this?",
    "Which number is written?",
    "What number is in the picture?",
    "Which number is in the picture?",
    "What is the number?",
    "What number do you see?",
    "Which number can you see?",
    "Read the number.",
    "What number does the picture show?",
    "What is the number in the picture?",
)
WHICH_TEXT: Final = (
    "What does it say?",
    "What does the picture say?",
    "What is written?",
    "What is written in the picture?",
    "Read the text.",
    "What text is in the picture?",
    "What is the text?",
    "What do you read?",
)
WHICH_WORD: Final = (
    "What word is written?",
    "What word is this?",
    "Which word is this?",
    "Which word is written?",
    "What word is in the picture?",
    "Which word is in the picture?",
    "What is the word?",
    "Read the word.",
    "What word do you see?",
    "What word does the picture show?",
)
WHERE: Final = (
    "Where is the {what}?",
    "Where is the {what}?",
    "Where's the {what}?",
    "Where in the picture is the {what}?",
    "Where do you see the {what}?",
    "Where can you see the {what}?",
    "Where can I find the {what}?",
    "In which part of the picture is the {what}?",
    "Tell me where the {what} is.",
    "What is the position of the {what}?",
)
EXISTS: Final = (
    "Is there {what}?",
    "Is there {what}?",
    "Is there {what} in the picture?",
    "Is there {what} in this picture?",
    "Do you see {what}?",
    "Can you see {what}?",
    "Does the picture show {what}?",
    "Does the picture contain {what}?",
    "Do you see {what} in the picture?",
    "Is {what} in the picture?",
)

SAME_COLOUR: Final = (
    "Do both pictures show the same colour?",
    "Are the two objects the same colour?",
    "Do the two objects have the same colour?",
    "Is the colour the same in both pictures?",
    "Are both objects of the same colour?",
    "Same colour?",
    "Do the objects in both pictures have the same colour?",
    "Is the object in the second picture the same colour as in the first?",
)
SAME_SHAPE: Final = (
    "Do both pictures show the same shape?",
    "Are the two objects the same shape?",
    "Do the two objects have the same shape?",
    "Is the shape the same in both pictures?",
    "Are both objects of the same shape?",
    "Same shape?",
    "Do the objects in both pictures have the same shape?",
    "Is the object in the second picture the same shape as in the first?",
)
WHICH_MORE: Final = (
    "Which picture has more objects?",
    "Which has more objects?",
    "Which picture shows more objects?",
    "In which picture are there more objects?",
    "Which of the two pictures has more objects?",
    "Where are more objects, in the first or the second picture?",
    "Which picture has more objects, the first or the second?",
    "Which one has more shapes?",
)
IN_IMAGE: Final = (
    "What is in the {nth} picture?",
    "What does the {nth} picture show?",
    "Describe the {nth} picture.",
    "What do you see in the {nth} picture?",
    "What can you see in the {nth} picture?",
    "What is shown in the {nth} picture?",
    "Tell me what is in the {nth} picture.",
    "What's in the {nth} picture?",
)

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant that answers questions about pictures.",
    "Answer briefly.",
    "You are pixie, a small model that sees.",
    "You are a friendly AI assistant.",
    "Answer the question about the picture.",
    "Be brief and exact.",
    "You are a vision assistant. Look carefully and answer.",
)

_BEFORE: Final = (
    "Please tell me, ",
    "Tell me, ",
    "Look at the picture. ",
    "Hi! ",
    "Hello, ",
    "Please, ",
    "Quick question: ",
)
_AFTER: Final = (" Please.", " Answer briefly.", " Be brief.", " Thanks!")
_AFTER_ONE_WORD: Final = (" Answer in one word.", " Answer with one word.", " One word, please.")


def vary(rng: random.Random, text: str, answer: str) -> str:
    """Vary spelling, courtesy and punctuation of a question, but not its meaning."""
    if rng.random() < 0.4:
        text = text.replace("colour", "color")
    draw = rng.random()
    if draw < 0.42:
        text = text.replace("picture", "image" if draw < 0.3 else "photo")
    draw = rng.random()
    if draw < 0.06:
        before = rng.choice(_BEFORE)
        text = before + (text[0].lower() + text[1:] if before.endswith(", ") else text)
    elif draw < 0.1:
        text += rng.choice(_AFTER)
    elif draw < 0.14 and " " not in answer:
        text += rng.choice(_AFTER_ONE_WORD)
    elif draw < 0.17 and text.endswith("?"):
        text = text[:-1] + ", please?"
    elif draw < 0.25 and text[-1] in "?.":
        text = text[:-1]
    if rng.random() < 0.12:
        text = re.sub(r"^[A-Z]", lambda match: match[0].lower(), text)
    return text


def ask(rng: random.Random, templates: tuple[str, ...], answer: str, **words: str) -> tuple[str, str]:
    return vary(rng, rng.choice(templates).format(**words), answer), answer
