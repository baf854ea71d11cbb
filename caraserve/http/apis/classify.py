"""POST /v1/classify: the classes of texts, by the score head of an adapter, in vLLM's shape.

As for transformers' classifiers, a class's score is the product of its row with the hidden state, after the final norm,
of the text's last token that is none of padding.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from caraserve.core.score_head import ScoreHead
from caraserve.errors import AdapterBusy
from caraserve.http.access.adapter_choice import AdapterFinder
from caraserve.http.api_request import AnswerWriter, ApiRequest, ResponseTotals
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.completions import response_head
from caraserve.http.apis.embeddings import EmbeddedTexts, input_prompts, list_pieces, vector_of
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import CLASSIFY
from caraserve.http.client import Client
from caraserve.http.whole_answer import WholeAnswer, response_of
from caraserve.loop import Engine

_RETRY_S = 1.0


async def parse_classify(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, CLASSIFY)
    uses_activation = body_fields.USE_ACTIVATION.read(fields)
    prompts = input_prompts(fields, engine)
    texts = EmbeddedTexts.read(fields, engine, find, client)
    texts.adapter.refuse_classification()
    response_id = f"classify-{secrets.token_hex(16)}"
    requests = await texts.requests(engine, response_id, prompts, reads_last=True)
    writer = ClassesWriter(response_head(response_id, "list", texts.model), uses_activation=uses_activation)
    return ApiRequest(requests, 1, stream=False, writer=writer)


def head_of(answer: WholeAnswer) -> ScoreHead:
    """Returns the score head of the version that has answered. Raises AdapterBusy if it has none."""
    head = None if answer.finish is None else answer.finish.head
    if head is None or not head.data:
        message = "the adapter was replaced by one without a score head meanwhile; send the request again"
        raise AdapterBusy(message, retry_after_s=_RETRY_S, param="model")
    return head


def class_scores(answer: WholeAnswer, *, uses_activation: bool = True) -> NDArray[np.float32]:
    """Returns the score of each class for an answer's text; with the activation, its probability. Raises
    AdapterBusy."""
    head = head_of(answer)
    logits = head.logits(vector_of(answer, normalize=False))
    return head.probabilities(logits) if uses_activation else logits


class ClassesWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `data`, one for each text."""

    def __init__(self, head: dict[str, Any], *, uses_activation: bool) -> None:
        self._head, self._uses_activation = head, uses_activation

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        for answer in answers:
            head_of(answer)  # before the first byte
        return await response_of(list_pieces(self._head, self._entries(answers), totals.tokens))

    def _entries(self, answers: Sequence[WholeAnswer]) -> Iterator[bytes]:
        for index, answer in enumerate(answers):
            scores, classes = class_scores(answer, uses_activation=self._uses_activation), head_of(answer).classes
            entry = {
                "index": index,
                "label": classes[int(scores.argmax())],
                "probs": scores,
                "num_classes": len(classes),
            }
            yield orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
