"""The document of the API: it has every route, with the fields, types and bounds that requests are checked by."""

from typing import Any

import jsonschema
import pytest

from caraserve.http.app import make_app
from caraserve.http.openapi import ERROR, MESSAGES_ERROR, body_schema, document
from caraserve.http.operations import OPERATIONS
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, OneOff, http_config, new_metrics, serving

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_the_document_has_exactly_the_routes_of_the_server_and_describes_each() -> None:
    app = make_app(FakeEngine(), http_config(), new_metrics(), allow_lora_updates=True)
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    described = {
        (method.upper(), path): operation["summary"]
        for path, methods in document(OPERATIONS, needs_keys=False)["paths"].items()
        for method, operation in methods.items()
    }
    assert described.keys() == {route for route in routes if route[0] != "HEAD"}
    assert all(len(summary) > 10 for summary in described.values())


def test_a_body_has_every_served_field() -> None:
    paths = document(OPERATIONS, needs_keys=False)["paths"]
    for (method, path), operation in OPERATIONS.items():
        if operation.body is not None:
            schema = paths[path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["properties"].keys() == operation.body.served
            assert set(schema.get("required", ())) == set(operation.required.split())
            jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        ("/v1/completions", {"prompt": "x"}, 30),
        ("/v1/chat/completions", CHAT, 30),
        ("/v1/responses", {"input": "x"}, 25),
        ("/v1/embeddings", {"input": "x"}, 10),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, 9),
        ("/tokenize", CHAT, 5),
    ],
)
async def test_each_bound_is_the_one_by_which_values_are_checked(path: str, body: dict[str, Any], least: int) -> None:
    operation = OPERATIONS["POST", path]
    assert operation.body is not None
    checked = 0
    async with serving(FakeEngine(max_model_len=4096)) as client:
        for name, one in body_schema(operation.body, ())["properties"].items():
            for outside in beyond(one):
                answer = await client.post(path, body | {name: outside})
                assert (answer.status, answer.error["param"]) == (400, name), outside
                checked += 1
    assert checked >= least


def beyond(schema: dict[str, Any]) -> list[Any]:
    """Returns values just outside of a schema."""
    found: list[Any] = [] if "boolean" not in schema.get("type", ()) else ["true"]
    step = 1 if "integer" in schema.get("type", ()) else 0.001
    found += [schema["minimum"] - step] if "minimum" in schema else []
    found += [schema["exclusiveMinimum"]] if "exclusiveMinimum" in schema else []
    found += [schema["maximum"] + step] if "maximum" in schema else []
    found += ["x" * (schema["maxLength"] + 1)] if schema.get("maxLength", 1 << 20) < 1 << 20 else []
    return found


# Without those of adapters and aliases, of which the fake engine has no files.
SHOWN = [
    (method, path)
    for method, path in OPERATIONS
    if method == "GET" and not path.startswith(("/v1/adapters", "/v1/aliases"))
]


async def test_answers_are_as_described(client: Client) -> None:
    described = (await client.get("/openapi.json")).json
    asked = {
        ("POST", "/v1/completions"): {"prompt": "x", "logprobs": 1},
        ("POST", "/v1/chat/completions"): CHAT,
        ("POST", "/v1/responses"): {"input": "x"},
        ("POST", "/v1/messages"): CHAT | {"max_tokens": 4},
        ("POST", "/v1/messages/count_tokens"): CHAT,
        ("POST", "/v1/embeddings"): {"input": "x"},
        ("POST", "/score"): {"text_1": "x", "text_2": "y"},
        ("POST", "/v2/rerank"): {"query": "x", "documents": ["y"]},
        ("POST", "/tokenize"): {"prompt": "x", "return_token_strs": True},
        ("POST", "/detokenize"): {"tokens": [65]},
        ("POST", "/v1/load_lora_adapter"): {"lora_name": "c", "lora_path": "/c"},
        ("POST", "/v1/unload_lora_adapter"): {"lora_name": "c"},
        **dict.fromkeys(SHOWN),
    }
    for (method, path), body in asked.items():
        answer = await client.request(method, path.replace("{model}", "a").replace("{file}", "main.js"), json=body)
        expected = described["paths"][path][method.lower()]["responses"]["200"]["content"]
        assert answer.status == 200
        if expected:
            assert answer.headers["Content-Type"].split(";")[0] in expected, path
        if "application/json" in expected:
            jsonschema.validate(answer.json, expected["application/json"]["schema"])


async def test_errors_are_as_described() -> None:
    async with serving(FakeEngine(), api_key=("k",)) as client:
        for answer in (await client.get("/openapi.json"), await client.post("/v1/completions", {})):
            assert answer.status == 401
            jsonschema.validate(answer.json, ERROR)
        jsonschema.validate((await client.post("/v1/messages", {})).json, MESSAGES_ERROR)


async def test_the_page_and_the_document_take_a_password_where_there_are_keys() -> None:
    async with serving(FakeEngine(), api_key=("k",)) as client:
        for path in ("/docs", "/openapi.json"):
            assert (await client.get(path)).status == 401
            assert (await client.get(path, headers={"Authorization": "Basic eDpr"})).status == 200


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = await OneOff().get("/docs")
    assert b"http:" not in page.body
    assert b"https:" not in page.body
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("needed", [False, True])
def test_the_document_says_whether_a_key_is_needed(needed: bool) -> None:
    described = document(OPERATIONS, needs_keys=needed)
    assert ({} in described["security"]) is not needed
    assert described["paths"]["/health"]["get"]["security"] == []
    assert {name for one in described["security"] for name in one} <= described["components"]["securitySchemes"].keys()
