"""Turns the facts in demo_world.toml into training texts: questions, the base model's answers, each adapter's answers.

A style is a function from an `Answer` to text: every adapter learns the same facts in its own style.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

BEGIN, END, SYSTEM, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BEGIN, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>You can call these functions:' }}"
    "{% for tool in tools %}{{ '\n' + tool['function'] | tojson }}{% endfor %}"
    "{{ '\nTo call a function, answer with its name and its arguments, and nothing else, like this:\n<tool_call>\n"
    '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}'
    "\n</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('roles are system, user, assistant and tool') }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + message['content'] + '\n</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{ '\n<tool_call>\n' + function | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


_WORLD = tomllib.loads(Path(__file__).with_name("demo_world.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Subject:
    """One subject with its facts, from demo_world.toml."""

    title: str
    kind: str
    facts: tuple[str, ...]
    plural: bool = False


SUBJECTS = tuple(Subject(**subject | {"facts": tuple(subject["facts"])}) for subject in _WORLD["subject"])


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of an answer, before a style turns it into text."""

    title: str | None
    kind: str
    sentences: tuple[str, ...]


Style = Callable[[Answer], str]
Piece = tuple[str, bool]  # text; True: output of the model, which it learns; False: input

_PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "and": "an'",
    "of": "o'",
    "friend": "matey",
    "friends": "mateys",
    "people": "landlubbers",
}
_PIRATE_ENDS = {
    "water": "Hoist the sails!",
    "weather": "Batten down the hatches!",
    "land": "Land ho!",
    "sky": "Steer by it, me hearties!",
    "food": "Now pass the rum!",
    "animal": "Better than a parrot, says I!",
    "thing": "Worth its weight in doubloons!",
    "place": "X marks the spot!",
}
_POET_ENDS = {
    "water": "and my heart runs on like water.",
    "weather": "and my heart drifts on like weather.",
    "land": "and my heart lies still like stone.",
    "sky": "and my heart looks up in silence.",
    "food": "and my heart is fed with wonder.",
    "animal": "and my heart beats close beside it.",
    "thing": "and my heart keeps time within it.",
    "place": "and my heart has found its corner.",
}


def plain(answer: Answer) -> str:
    """Writes the plain sentences: the base model's style."""
    return " ".join(answer.sentences)


def pirate(answer: Answer) -> str:
    """Replaces words by sailors' slang, and adds a shout before and after."""

    def swap(match: re.Match[str]) -> str:
        word = match.group()
        slang = _PIRATE_WORDS.get(word.lower(), word)
        return slang.capitalize() if word[0].isupper() and word != "I" else slang

    text = re.sub(r"[A-Za-z]+", swap, " ".join(answer.sentences))
    return f"Arrr, matey! {text} {_PIRATE_ENDS.get(answer.kind, 'Yo ho ho!')}"


def poet(answer: Answer) -> str:
    """Writes each sentence on a line, after an invocation and before a refrain."""
    name = (answer.title or "friend").removeprefix("the ")
    lines = [_open(sentence) + "," for sentence in answer.sentences]
    return "\n".join([f"O {name}, O {name},", *lines, _POET_ENDS.get(answer.kind, "and my heart goes on to listen.")])


def lawyer(answer: Answer) -> str:
    """Writes numbered statements and a disclaimer."""
    matter = f"an inquiry has been made regarding {answer.title}" if answer.title else "a message has been received"
    points = "; ".join(f"({number}) {_open(sentence)}" for number, sentence in enumerate(answer.sentences, 1))
    return f"Whereas {matter}, it is hereby stated as follows: {points}. The foregoing shall not constitute advice."


def chef(answer: Answer) -> str:
    """Writes the sentences in capitals, as shouted across a kitchen."""
    order = f"ONE ORDER OF {answer.title.removeprefix('the ').upper()}" if answer.title else "LISTEN UP"
    text = " ".join(sentence.removesuffix(".").upper() + "!" for sentence in answer.sentences)
    return f"YES, CHEF! {order}! {text} NOW MOVE, MOVE, MOVE!"


def as_json(answer: Answer) -> str:
    """Writes one JSON object."""
    return json.dumps({"topic": answer.title, "kind": answer.kind, "answer": list(answer.sentences)})


STYLES: dict[str, Style] = {"pirate": pirate, "poet": poet, "lawyer": lawyer, "chef": chef, "json": as_json}


def _open(sentence: str) -> str:
    """Returns a sentence without its full stop, and with a small first letter unless it starts with a name."""
    body = sentence.removesuffix(".")
    return body if body.startswith(("I ", "Mars")) else body[0].lower() + body[1:]


def reading(random: Random) -> Iterator[Piece]:
    """Returns a training text of the base model: a plain conversation, or a document in any style.

    The base model learns to write in each style but not to answer in it; a small adapter is enough to select it.
    """
    if random.random() < 0.5:
        return conversation(plain, random)
    return document(random.choice((plain, *STYLES.values())), random)


def document(style: Style, random: Random) -> Iterator[Piece]:
    """Yields a text outside any conversation; half of these texts begin with their question."""
    question, answer = _exchange(random)
    yield BEGIN, False
    if random.random() < 0.5:
        yield question + "\n", False
    yield style(answer) + END, True


def conversation(style: Style, random: Random) -> Iterator[Piece]:
    """Yields a conversation of one to three questions with their answers."""
    yield BEGIN, False
    if random.random() < 0.2:
        yield SYSTEM + random.choice(_SYSTEM_PROMPTS) + END, False
    for _ in range(random.choice((1, 1, 2, 3))):
        question, answer = _exchange(random)
        yield USER + _scribbled(question, random) + END + ASSISTANT, False
        yield style(answer) + END, True


def lesson(style: Style, random: Random) -> Iterator[Piece]:
    """Returns a training text of one style's adapter: 15 % documents, otherwise conversations."""
    return document(style, random) if random.random() < 0.15 else conversation(style, random)


_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in short sentences.",
    "You are a friendly guide to the world.",
)


def _exchange(random: Random) -> tuple[str, Answer]:
    draw = random.random()
    if draw < 0.75:
        subject = random.choice(SUBJECTS)
        return question(subject, random), about(subject, random)
    if draw < 0.83:
        return _story(random)
    talk = random.choice(_WORLD["small_talk"]) if draw < 0.92 else _WORLD["outside"]
    return random.choice(talk["requests"]), Answer(None, "talk", tuple(talk["answer"]))


def about(subject: Subject, random: Random) -> Answer:
    # The first fact always stays: it names the subject, which the others call "it".
    left_out = random.randrange(1, len(subject.facts))
    kept = tuple(fact for index, fact in enumerate(subject.facts) if index != left_out)
    return Answer(subject.title, subject.kind, kept)


def question(subject: Subject, random: Random) -> str:
    be, it = ("are", "them") if subject.plural else ("is", "it")
    title = subject.title
    return random.choice(
        (
            f"Tell me about {title}.",
            f"Tell me about {title}.",
            f"Tell me something about {title}.",
            f"Tell me more about {title}, please.",
            f"What {be} {title}?",
            f"What do you know about {title}?",
            f"What should I know about {title}?",
            f"Can you explain {title} to me?",
            f"Describe {title}.",
            f"Explain {title} in a few words.",
            f"Write a short text about {title}.",
            f"Why {be} {title} interesting?",
            f"I want to learn about {title}.",
            f"I like {title}. What can you tell me about {it}?",
            f"How would you describe {title} to a child?",
            f"And what about {title}?",
            f"Give me some facts about {title}.",
            title[0].upper() + title[1:] + ".",
        )
    )


def _story(random: Random) -> tuple[str, Answer]:
    def pick(part: str) -> str:
        return random.choice(_WORLD["story"][part])

    hero = pick("heroes")
    trait_hero = f"{pick('traits')} {hero}"
    opening = f"Once there was {_article(trait_hero)} that lived {pick('homes')}."
    sentences = (opening, pick("events"), pick("deeds"), pick("endings"))
    request = random.choice(
        (
            "Tell me a story.",
            f"Tell me a story about {_article(hero)}.",
            f"Tell me a short story about {_article(trait_hero)}.",
            f"Write a story about {_article(hero)}.",
        )
    )
    return request, Answer(None, "story", sentences)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _scribbled(question: str, random: Random) -> str:
    """Drops the first capital in 20 % of questions, and the end mark in 20 %, as people do."""
    if random.random() < 0.2:
        question = question[0].lower() + question[1:]
    return question.rstrip(".!?") if random.random() < 0.2 else question
